"""A folder of this user alone, the locks in it, and one for the length of a job's restore. POSIX only.

All access goes through the folder's own descriptor, one part of a name at a time, and follows no link. So a link that
another user puts there under one of our names cannot lead a read or a write elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast_client.errors import ConfigurationError
from holdfast_client.transport import check_stop

_FIRST_POLL_SECONDS = 0.002
_LONGEST_POLL_SECONDS = 0.05
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class PrivateFolder:
    """Made with mode 0700 if it does not exist. Raises ConfigurationError if others could change its content, and
    OSError if it cannot be made. `close` it at the end."""

    def __init__(self, path: Path) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(self.descriptor)
        if found.st_uid != os.geteuid():
            os.close(self.descriptor)
            raise ConfigurationError(
                f"{path} belongs to another user. Run this as that user, or choose a folder of your own."
            )
        if found.st_mode & _OTHERS_MAY_WRITE:
            os.close(self.descriptor)
            raise ConfigurationError(
                f"Other users can change what is in {path}. Choose a folder of your own, or run `chmod 700` on it."
            )

    @contextmanager
    def subfolder(self, name: str, *, make: bool = False) -> Iterator[int]:
        """A descriptor of a folder in it. Raises FileNotFoundError if it does not exist and must not be made."""
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
    """A regular file of a folder, never a link's target. Raises OSError."""
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(f"{name} is no regular file")
    return descriptor


def try_lock(descriptor: int) -> bool:
    """Takes the file's lock if it is free. It ends with `unlock`, or with the process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Closing alone would leave the lock to a child that was forked meanwhile."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def wait_until(succeeds: Callable[[], bool], seconds: float, stop: threading.Event | None = None) -> bool:
    """Polls, because a wait for a lock by flock itself could neither be bounded nor stopped. False if the time is over.
    Raises TransferStopped."""
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


_NAME = re.compile(r"[0-9a-f]{32}\Z")
_LOCK_SECONDS = 10.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def new_job_folder(where: Path) -> Iterator[Path]:
    """A new folder `<where>/holdfast-<user>/<random>/`, for one job's restore on one host: shared by its processes, and
    removed at the end of the block, even if another process still uses it.

    Every user of the folder holds a shared lock on it. The system releases a dead process's lock, so an unlocked folder
    is a dead job's: the next call of this removes it. Raises OSError, and ConfigurationError if another user has taken
    the name."""
    root = PrivateFolder(where / f"holdfast-{os.geteuid()}")
    try:
        name = secrets.token_hex(16)
        # Under the lock: between making a folder and locking it, it would look like a dead job's.
        with _alone(root):
            _sweep(root.descriptor)
            os.mkdir(name, 0o700, dir_fd=root.descriptor)
            lock = _use(name, root.descriptor)
        try:
            yield root.path / name
        finally:
            shutil.rmtree(name, ignore_errors=True, dir_fd=root.descriptor)
            _leave(lock)
    finally:
        root.close()


@contextmanager
def job_folder_in_use(path: Path) -> Iterator[None]:
    """Another process's folder, for the block: no process takes it for a dead job's meanwhile. Raises OSError."""
    lock = _use(str(path), None)
    try:
        yield
    finally:
        _leave(lock)


@contextmanager
def _alone(root: PrivateFolder) -> Iterator[None]:
    if not wait_until(lambda: try_lock(root.descriptor), _LOCK_SECONDS):
        raise TimeoutError(f"{root.path} has been locked for {_LOCK_SECONDS:.0f} s")
    try:
        yield
    finally:
        unlock(root.descriptor)


def _sweep(root: int) -> None:
    for name in filter(_NAME.match, os.listdir(root)):
        with suppress(OSError):
            descriptor = os.open(name, _FOLDER, dir_fd=root)
            try:
                if try_lock(descriptor):
                    shutil.rmtree(name, ignore_errors=True, dir_fd=root)
                    unlock(descriptor)
            finally:
                os.close(descriptor)


def _use(name: str, folder: int | None) -> int:
    descriptor = os.open(name, _FOLDER, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _leave(descriptor: int) -> None:
    unlock(descriptor)
    os.close(descriptor)
