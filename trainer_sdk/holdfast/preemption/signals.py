"""SIGTERM and SIGUSR1 as notices, seen at once even while the main thread is inside a collective (rule sigterm-thread).

    signal -> C handler writes its number into a pipe (signal.set_wakeup_fd) -> a thread reads it -> notice

A Python handler alone would run only when the main thread comes back to the interpreter, which may be after the
deadline. It sees to those signals whose wakeup fd an event loop has taken. An earlier handler or wakeup fd is still
served. A forked child (a data loader's worker, which SIGTERM ends) shares the pipe and must not write into it, so it
gets the earlier ones back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

log = logging.getLogger("holdfast")

_END = b"\x00"
_installed: weakref.WeakSet[SignalWatch] = weakref.WeakSet()


class SignalWatch:
    """Calls `seen(number)` on a thread of its own, for each signal that arrives. Does nothing outside the main thread,
    because Python refuses handlers there."""

    def __init__(self, signals: Sequence[signal.Signals], seen: Callable[[signal.Signals], None]) -> None:
        self._seen = seen
        self._process_id = os.getpid()
        self._earlier: dict[signal.Signals, Any] = {}
        self._earlier_fd = -1
        self._behind: SignalWatch | None = None  # the watch that reads the earlier fd, if one does
        self._closed = False
        self._handler = self._handle  # one object, to recognise it
        self.installed = bool(signals) and threading.current_thread() is threading.main_thread()
        if not self.installed:
            if signals:
                log.warning(
                    "this Checkpointer is not made on the main thread, so it does not see %s; a notice of the cloud "
                    "still saves. Make it on the main thread.",
                    " and ".join(number.name for number in signals),
                )
            return
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._thread = threading.Thread(target=self._read, name="holdfast-signals", daemon=True)
        self._thread.start()
        # The pipe first, so that a signal between the two is written and read.
        self._earlier_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._behind = next((watch for watch in _installed if watch._write_fd == self._earlier_fd), None)
        for number in signals:
            self._earlier[number] = _living(signal.signal(number, self._handler), number)
        _installed.add(self)

    @property
    def signals(self) -> frozenset[signal.Signals]:
        return frozenset(self._earlier)

    def has_earlier_handler(self, number: signal.Signals) -> bool:
        """Whether another handler acts on this signal too, and may end the process in its own way."""
        return callable(self._earlier.get(number))

    def close(self) -> None:
        """Puts the earlier handlers back, unless later ones lie on top. May be called twice."""
        if not self.installed or self._closed or os.getpid() != self._process_id:
            return
        self._closed = True
        restored = threading.current_thread() is threading.main_thread() and self._put_back()
        os.write(self._write_fd, _END)
        self._thread.join()
        if restored:
            # If not, another handler may still write into it, or put it back; then the number must not become another
            # file's.
            _installed.discard(self)
            os.close(self._read_fd)
            os.close(self._write_fd)

    def _put_back(self) -> bool:
        """False if other handlers lie on top of ours."""
        ours = True
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_DFL if earlier is None else _living(earlier, number))
            else:
                ours = False
        current = signal.set_wakeup_fd(self._living_fd(), warn_on_full_buffer=False)
        if current != self._write_fd:
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
            ours = False
        return ours

    def _living_fd(self) -> int:
        """The earlier fd, or the one before it if a closed watch owned it: nobody reads the pipe of a closed watch."""
        if self._behind is not None and self._behind._closed:
            return self._behind._living_fd()
        return self._earlier_fd

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """On the main thread, in time. The thread has seen the signal before, unless the wakeup fd is another one; this
        serves the earlier handler, and keeps the signal from ending the process."""
        acts = not self._closed and os.getpid() == self._process_id
        is_seen = not acts or self._is_woken()
        earlier = _living(self._earlier.get(signal.Signals(number)), signal.Signals(number))
        try:
            if callable(earlier):
                earlier(number, frame)
            elif not acts and earlier is signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        finally:
            if not is_seen and not self._closed:
                with contextlib.suppress(BlockingIOError):  # full: the thread will see enough of them
                    os.write(self._write_fd, bytes([number]))

    def _is_woken(self) -> bool:
        """Whether signals come into the pipe of a watch; an outer one passes them on. An event loop takes the wakeup fd
        while it runs, and leaves none behind; then it is ours again."""
        current = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if current not in (-1, self._write_fd):
            with contextlib.suppress(OSError, ValueError):  # its owner may have closed it
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        return any(watch._write_fd == current and not watch._closed for watch in list(_installed))

    def _read(self) -> None:
        while True:
            for number in os.read(self._read_fd, 64):
                if number == _END[0]:
                    return
                if (earlier_fd := self._living_fd()) >= 0:
                    with contextlib.suppress(OSError):  # it may be full, or closed by now
                        os.write(earlier_fd, bytes([number]))
                with contextlib.suppress(ValueError):
                    if (known := signal.Signals(number)) in self._earlier:
                        self._seen(known)

    def forget_in_child(self) -> None:
        """After a fork, in the child: its signals are its own."""
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
        signal.set_wakeup_fd(-1)


def _living(handler: Any, number: signal.Signals) -> Any:
    """The handler behind closed watches, whose own would end the process. An earlier watch may close before a later
    one, and Lightning puts a handler back after its owner has gone."""
    watch = getattr(handler, "__self__", None)
    while isinstance(watch, SignalWatch) and watch._closed:
        handler = watch._earlier.get(number, signal.SIG_DFL)
        watch = getattr(handler, "__self__", None)
    return handler


class _Forking(threading.local):
    """The signal mask of a thread before it began to fork."""

    mask: set[int] | None = None


_forking = _Forking()


def _before_fork() -> None:
    # Between the fork and the child's first line, a signal to the child would be written into the parent's pipe.
    if _installed:
        watched = {number for watch in list(_installed) for number in watch.signals}
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)


def _after_fork_in_parent() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)
        _forking.mask = None


def _after_fork_in_child() -> None:
    for watch in list(_installed):
        watch.forget_in_child()
    _installed.clear()
    _after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
