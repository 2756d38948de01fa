"""One server process: started, waited for, ended by its own pid, with its log at hand when it does not come up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.forked import ForkedProgram


class ServerProcess:
    """`ready` is asked every 20 ms until it is true; a process that ends before that raises with its last words.

    `forked`: the first word of the command is an entry point of Python, and the process is a ForkedProgram.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        ready: Callable[[], bool],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        start_seconds: float = 240,
        forked: bool = False,
    ) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | ForkedProgram
        if forked:
            environment = os.environ if env is None else env
            self._process = ForkedProgram(command[0], command[1:], environment=environment, folder=cwd, log=log)
        else:
            self._process = _started(command, log, cwd, env, user)
        try:
            self._wait_until(ready, start_seconds, command[0])
        except BaseException:
            self.kill9()
            raise

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def log_text(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def wait(self, retry_deadline_seconds: float) -> None:
        """Until it has ended by itself; after that time it is killed."""
        try:
            self._process.wait(retry_deadline_seconds)
        except subprocess.TimeoutExpired:
            self.kill9()

    def stop(self, *, with_signal: signal.Signals = signal.SIGTERM, grace_seconds: float = 60) -> None:
        """Asks it to end, and ends it if it does not. Twice is fine."""
        if self._process.poll() is None:
            self._process.send_signal(with_signal)
            try:
                self._process.wait(grace_seconds)
            except subprocess.TimeoutExpired:
                self.kill9()

    def signal(self, number: signal.Signals) -> None:
        """To it and to its process group; nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)

    def kill9(self) -> None:
        """SIGKILL to it and to what it started in its own process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # a fork that has just begun leads no group yet
        self._process.wait()

    def _wait_until(self, ready: Callable[[], bool], start_seconds: float, name: str) -> None:
        deadline = time.monotonic() + start_seconds
        while not ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"{name} ended with {self._process.returncode}:\n{self.log_text[-4000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} was not ready after {start_seconds:.0f} s:\n{self.log_text[-4000:]}")
            time.sleep(0.02)


def _started(
    command: Sequence[str], log: Path, cwd: Path | None, env: Mapping[str, str] | None, user: str | None
) -> subprocess.Popen[bytes]:
    as_user = {"user": user, "group": user, "extra_groups": []} if user else {}
    with log.open("ab") as output:
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=dict(env) if env is not None else None,
            start_new_session=True,
            **as_user,
        )
