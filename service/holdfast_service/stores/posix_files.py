"""The few file operations that a posix store is built from: each durable when it returns, none ever overwrites.

Here, and only here, an OSError becomes a StoreError.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from holdfast_service.stores.base import ObjectMissing, StoreError, StoreFull, StoreRefused, StoreUnavailable

INCOMING = "incoming"
_ABSENT = {errno.ENOENT, errno.ENOTDIR}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTSUP, errno.EMLINK, errno.ENAMETOOLONG, errno.EXDEV}


@contextmanager
def store_errors(root: Path) -> Iterator[None]:
    """Gives every OSError inside the name that the service acts upon."""
    try:
        yield
    except OSError as error:
        raise _translated(error, root) from error


def _translated(error: OSError, root: Path) -> StoreError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _ABSENT:
        if (root / INCOMING).is_dir():
            return ObjectMissing("there is no such object in the store")
        # Without its own folder the whole store is away (not mounted): no object may be called missing then.
        return StoreUnavailable(f"the store's folder {root} is not there; check that it is mounted")
    if error.errno in _FULL:
        return StoreFull(f"the store at {root} is full ({reason}); free some room or raise its quota")
    if error.errno in _REFUSED:
        return StoreRefused(
            f"the store at {root} refuses the service ({reason}); check owner and permissions, "
            "and that it is a filesystem with hard links"
        )
    return StoreUnavailable(f"the store at {root} does not work now ({reason})")


def fsync_folder(folder: Path) -> None:
    """Makes the names in it durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Creates it and what is above it. Its name is durable afterwards, also if another process created it just now."""
    try:
        folder.mkdir()
    except FileExistsError:
        pass
    except FileNotFoundError:
        make_folder(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir()
    fsync_folder(folder.parent)


def link_new(source: Path, destination: Path) -> bool:
    """Publishes `source` under a second name that was free until now. False if another file has that name."""
    while True:
        make_folder(destination.parent)
        try:
            os.link(source, destination, follow_symlinks=False)
        except FileExistsError:
            # Over NFS a retransmitted link() finds its own earlier success.
            linked = os.path.samestat(os.lstat(source), os.lstat(destination))
        except FileNotFoundError:
            os.lstat(source)  # raises if it is the source that is missing
            continue  # a delete removed the empty folder between the two calls
        else:
            linked = True
        fsync_folder(destination.parent)
        return linked


def remove_whatever(path: Path) -> None:
    """What a client left in `incoming/`, which may be anything; its absence is fine. Follows no link."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):  # which of the two depends on the system
        shutil.rmtree(path)


class StagedFile:
    """A file that the service writes to `incoming/`: hashed as it is written, gone on `discard` unless published."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.path = root / INCOMING / f"{secrets.token_hex(16)}.part"
        self._hash = hashlib.sha256()
        self._descriptor: int | None = None
        self.bytes = 0
        # A cancelled request discards while a thread may still be writing: a closed descriptor's number is soon
        # another file's.
        self._lock = threading.Lock()
        with store_errors(root):
            self._descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with self._lock, store_errors(self._root):
            view = memoryview(data)
            self._hash.update(view)
            self.bytes += len(view)
            while view:
                view = view[os.write(self._open_descriptor(), view) :]

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def sync(self) -> None:
        with self._lock, store_errors(self._root):
            os.fsync(self._open_descriptor())

    def discard(self) -> None:
        """Closes it and removes its first name; a published object has its own by then."""
        with self._lock, store_errors(self._root), suppress(FileNotFoundError):
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
                self.path.unlink()

    def __enter__(self) -> StagedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise OSError(errno.EBADF, "discarded")
        return self._descriptor
