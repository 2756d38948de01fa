"""A folder of this user alone, and the locks in it: the ground that the chunk folder stands on. POSIX only.

Everything is reached from the folder's own descriptor, a part of the name at a time, and no link is followed: what
somebody puts there under a name of ours cannot lead a read or a write elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast_client.chunks.stopping import check_stop
from holdfast_client.errors import ConfigurationError

_FIRST_POLL_SECONDS = 0.002
_LONGEST_POLL_SECONDS = 0.05
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class PrivateFolder:
    """Made with mode 0700 where it is not there. Raises ConfigurationError where others could change what is in it, and
    OSError where it cannot be made. `close` it at the end."""

    def __init__(self, path: Path) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(self.descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_MAY_WRITE:
            os.close(self.descriptor)
            raise ConfigurationError(
                f"Other users can change what is in {path}. Choose a folder of your own, or run `chmod 700` on it."
            )

    @contextmanager
    def subfolder(self, name: str, *, make: bool = False) -> Iterator[int]:
        """A descriptor of a folder in it. Raises FileNotFoundError where it is not there and not to be made."""
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.descriptor)
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Twice is fine."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def open_file(name: str, flags: int, folder: int) -> int:
    """A regular file of a folder, never what a link leads to. Raises OSError."""
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(f"{name} is no regular file")
    return descriptor


def try_lock(descriptor: int) -> bool:
    """Takes the file's lock if nobody has it. It ends with `unlock`, or with the process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Closing alone would leave the lock to a child that was forked meanwhile."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def wait_until(succeeds: Callable[[], bool], seconds: float, stop: threading.Event | None = None) -> bool:
    """Tries again and again: a wait for a lock by flock itself could neither be bounded nor stopped. False if the time
    is over. Raises TransferStopped."""
    ends, pause = time.monotonic() + seconds, _FIRST_POLL_SECONDS
    while not succeeds():
        check_stop(stop)
        if time.monotonic() >= ends:
            return False
        if stop is None:
            time.sleep(pause)
        else:
            stop.wait(pause)
        pause = min(pause * 2, _LONGEST_POLL_SECONDS)
    return True
