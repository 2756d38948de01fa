"""One process of the host fetches a chunk, the others wait for it: a lock on a small file named by the digest.

The system releases a dead process's lock. The last holder of a lock removes its file. After taking a lock, a process
checks that the file still has that name, because two processes could otherwise hold it at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast_client.local.private_folder import PrivateFolder, open_file, try_lock, unlock, wait_until

FOLDER = "fetching"


@contextmanager
def alone(root: PrivateFolder, name: str, *, wait_seconds: float, stop: threading.Event | None) -> Iterator[bool]:
    """Holds the lock of this name for the block: True. False if another process held it for the whole time: the block
    runs all the same, not alone. Raises TransferStopped while it waits; OSError."""
    with root.subfolder(FOLDER, make=True) as folder:
        got: list[int] = []

        def try_once() -> bool:
            descriptor = _lock_file(folder, name)
            if descriptor is not None:
                got.append(descriptor)
            return descriptor is not None

        wait_until(try_once, wait_seconds, stop)
        try:
            yield bool(got)
        finally:
            for descriptor in got:
                _leave(descriptor, folder, name)


def sweep(root: PrivateFolder) -> None:
    """Removes the files of dead processes. Files in use are locked, and stay."""
    with suppress(FileNotFoundError), root.subfolder(FOLDER) as folder:
        for name in os.listdir(folder):
            with suppress(OSError):
                descriptor = _lock_file(folder, name)
                if descriptor is not None:
                    _leave(descriptor, folder, name)


def _lock_file(folder: int, name: str) -> int | None:
    descriptor = open_file(name, os.O_RDWR | os.O_CREAT, folder)
    if try_lock(descriptor):
        with suppress(FileNotFoundError):
            if os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        unlock(descriptor)
    os.close(descriptor)
    return None


def _leave(descriptor: int, folder: int, name: str) -> None:
    try:
        # Before the lock is released: afterwards another process may have it.
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
        unlock(descriptor)
    finally:
        os.close(descriptor)
