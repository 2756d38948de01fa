"""The job's launcher as a child: started, signalled, waited for. Signals are taken one by one from the kernel, so that
none comes at a moment when there is nobody to send it on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast_client.errors import ConfigurationError

TICK_SECONDS = 0.5

_SENT_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FROM_THE_TERMINAL = 0x80  # SI_KERNEL: the terminal has sent it to all of its foreground processes, the child too


class Child:
    """One command. `code` is None while it runs, then its exit status, or minus the signal that ended it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises ConfigurationError where it cannot be started."""
        # A terminal's foreground group has the keyboard, so the child stays in it. Without a terminal it gets a group
        # of its own: batch systems signal groups, and torchrun must not get what it would die of.
        self._shares_terminal = sys.stdin is not None and sys.stdin.isatty()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._taken = {number for number in _SENT_ON if signal.getsignal(number) is not signal.SIG_IGN}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*self._taken, signal.SIGCHLD})
        group: dict[str, Any] = {} if self._shares_terminal else {"setpgroup": 0}
        try:
            self._pid = os.posix_spawnp(
                command[0],
                list(command),
                dict(environment),
                setsigmask=before,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores these, and no other program expects that
                **group,
            )
        except OSError as error:
            raise ConfigurationError(
                f"{command[0]} cannot be started ({error.strerror}). Write the command after `--` as you would type it."
            ) from None
        self.code: int | None = None

    def wait(self, on_signal: Callable[[int], None], on_tick: Callable[[], None]) -> int:
        """Until the child has ended. `on_signal` gets each signal that is to be sent on; `on_tick` is called twice a
        second. The signals stay blocked: what comes later must not take the exit code's place."""
        while self.code is None:
            info = signal.sigtimedwait({*self._taken, signal.SIGCHLD}, TICK_SECONDS)
            if info is None:
                on_tick()
            elif info.si_signo != signal.SIGCHLD and not (self._shares_terminal and info.si_code == _FROM_THE_TERMINAL):
                on_signal(info.si_signo)
            self._reap()
        return self.code

    def send(self, number: int) -> None:
        """To the child alone, not to its group: a data loader's workers must live for the step to end."""
        if self.code is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        """It and its group. A terminal's group is ours too: there the child goes alone."""
        if self.code is not None:
            return
        if self._shares_terminal:
            os.kill(self._pid, signal.SIGKILL)
        else:
            os.killpg(self._pid, signal.SIGKILL)

    def _reap(self) -> None:
        # All there are: as the first process of a container we are the parent of what others left behind.
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self.code = os.waitstatus_to_exitcode(status)
