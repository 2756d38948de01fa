"""A folder for the length of one job's restore, shared by its processes on one host, and gone afterwards.

    <where>/holdfast-<user>/<random>/

All that use it have it locked, shared. The system lets go of a dead process's lock, so a folder that nobody has locked
is a dead job's: whoever makes the next one removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast_client.local.private_folder import PrivateFolder, try_lock, unlock, wait_until

_NAME = re.compile(r"[0-9a-f]{32}\Z")
_LOCK_SECONDS = 10.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def new_job_folder(where: Path) -> Iterator[Path]:
    """A new folder below `where`, for the block; it is removed at the end, whoever still uses it. Raises OSError, and
    ConfigurationError if somebody else has taken the name."""
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
    """Another process's folder, for the block: nobody takes it for a dead job's meanwhile. Raises OSError."""
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
