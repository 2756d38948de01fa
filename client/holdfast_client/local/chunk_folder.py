"""Chunks on this machine's disk, named by digest, for several processes at once: cache of a restore, local tier, spool.

<2 hex>/<digest>    a chunk, whole: it was written under `incoming` and renamed
incoming/           files that are being written; each is locked by its writer, so one without a lock is a dead one's
holds/<name>        digests that must stay (room.py)
fetching/<digest>   the lock of the process that fetches it (single_flight.py)
ledger              the folder's lock, and in it the bytes used (room.py)
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from holdfast_client.local import single_flight
from holdfast_client.local.private_folder import PrivateFolder, open_file, unlock
from holdfast_client.local.room import Hold, Room, Slot, hold_names
from holdfast_client.transport import check_stop
from holdfast_protocol.digests import DIGEST_PATTERN

_DIGEST = re.compile(DIGEST_PATTERN)
_BLOCK_BYTES = 1024 * 1024
_MOST_PROVEN = 16_384
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LINK = {errno.ENOTDIR, errno.ELOOP}
"""Opening gives this if a link has one of our names: it is not followed, and counts as absent."""


class ChunkFolder:
    """Thread-safe, and safe between processes of one host; not for a network filesystem. `limit_bytes` covers chunks
    and files that are being written; None: nine tenths of what the folder has and what is free on the disk now. Raises
    ConfigurationError if others can write there, and OSError if it is not usable."""

    def __init__(self, path: Path, *, limit_bytes: int | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._proven: dict[str, int] = {}
        # The owner may reach the folder itself by a link; nothing in it may be one.
        self._root = PrivateFolder(path.resolve())
        self._room = Room(self._root, limit_bytes or 0)
        try:
            used = self._room.tidy()
            if limit_bytes is None:
                self._room.limit_bytes = (used + shutil.disk_usage(path).free) // 10 * 9
            single_flight.sweep(self._root)
        except BaseException:
            self._root.close()
            raise

    @property
    def limit_bytes(self) -> int:
        return self._room.limit_bytes

    def size(self, digest: str) -> int | None:
        """Bytes of the chunk's file; None if it is not there. Only reading proves their content. Raises OSError."""
        with self.opened(digest) as descriptor:
            return None if descriptor is None else os.fstat(descriptor).st_size

    def read_into(self, digest: str, buffer: memoryview, *, stop: threading.Event | None = None) -> bool:
        """Fills the buffer, exactly as long as the chunk, and proves it by SHA-256. False if the chunk is not there; a
        file with other bytes, twice, is removed, and False too. After False the buffer's content is undefined.

        Raises TransferStopped, and OSError if the disk or this process is in trouble: the chunk may well be there.
        """
        with self.opened(digest) as descriptor:
            if descriptor is None:
                return False
            try:
                if not self._proves(digest, descriptor, buffer, stop):
                    return False
            except OSError:
                with self._lock:
                    self._proven.pop(digest, None)  # the next durable add must not rely on it
                raise
            _note_use(descriptor)
            return True

    def add(self, digest: str, body: bytes | memoryview, *, durable: bool) -> bool:
        """Keeps a chunk whose digest the caller has proven; `durable`: also after a loss of power.

        False, with nothing left behind, if neither limit nor disk has room after eviction. A chunk that is there
        already is only marked as used. A durable one is read back from the disk, unless this process has done so or has
        written it durably: a file of the right size may be damaged by a loss of power. What the disk has not taken or
        does not give back is written anew. Raises OSError for any other refusal of the disk.
        """
        view = memoryview(body)
        if self._is_there(digest, view.nbytes, durable=durable):
            return True
        try:
            return self._write(digest, view, durable=durable)
        except OSError as error:
            if error.errno not in _FULL:
                raise
        try:
            return self._room.free(view.nbytes) and self._write(digest, view, durable=durable)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return False

    def hold(self, name: str) -> Hold:
        """The hold of this name: letters, digits, `.`, `_`, `-`. Its file is written with the first digest."""
        return Hold(self._root, self._room.locked, name)

    def holds(self) -> list[str]:
        """The names of all holds, including those of ended processes."""
        return hold_names(self._root)

    def fetching(
        self, digest: str, *, wait_seconds: float, stop: threading.Event | None = None
    ) -> AbstractContextManager[bool]:
        """A block for one process (and thread) of the host at a time. The others wait; inside the block look into the
        folder again. False if the wait took too long; then fetch all the same. Raises TransferStopped, OSError."""
        return single_flight.alone(self._root, _checked(digest), wait_seconds=wait_seconds, stop=stop)

    def close(self) -> None:
        """May be called twice. The folder's content stays."""
        self._root.close()

    @contextmanager
    def opened(self, digest: str) -> Iterator[int | None]:
        """A descriptor of the chunk's file, for the block; None if it is not there. Its bytes are not proven. Raises
        OSError."""
        try:
            with self._root.subfolder(_checked(digest)[:2]) as shard:
                descriptor = open_file(digest, os.O_RDONLY, shard)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and error.errno not in _LINK:
                raise
            yield None
            return
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _is_there(self, digest: str, size: int, *, durable: bool) -> bool:
        with self.opened(digest) as descriptor:
            if descriptor is None or os.fstat(descriptor).st_size != size:
                return False
            if durable and not self._is_durable(digest, descriptor):
                return False
            _note_use(descriptor)
            # It may have been evicted since it was opened.
            return os.fstat(descriptor).st_nlink > 0

    def _is_durable(self, digest: str, descriptor: int) -> bool:
        """Makes it so. False if the disk does not take the bytes, and the file is gone then, or if it has others."""
        try:
            os.fsync(descriptor)
        except OSError:
            # The kernel says so once: who opens this file later is told of no error, and reads it from memory.
            with self._lock:
                self._proven.pop(digest, None)
            with suppress(FileNotFoundError):  # another process was told the same, or evicted it
                self._room.remove(digest, descriptor)
            return False
        inode = os.fstat(descriptor).st_ino
        if self._proven.get(digest) != inode and not _is_whole(descriptor, digest):
            return False
        self._note_proven(digest, inode)
        self._sync_names(digest)
        return True

    def _write(self, digest: str, body: memoryview, *, durable: bool) -> bool:
        slot = self._room.reserve(body.nbytes)
        if slot is None:
            return False
        try:
            _fill(slot, body, durable=durable)
            self._room.publish(slot, digest, durable=durable)
        except BaseException:
            self._room.discard(slot)
            raise
        finally:
            inode = os.fstat(slot.descriptor).st_ino
            unlock(slot.descriptor)
            os.close(slot.descriptor)
        if durable:
            self._note_proven(digest, inode)
            self._sync_names(digest)
        return True

    def _proves(self, digest: str, descriptor: int, buffer: memoryview, stop: threading.Event | None) -> bool:
        """Fills the buffer. False if the file has other bytes, or another size than the buffer."""
        if _read(descriptor, buffer, stop) == digest:
            return True
        if self._is_wrong(digest, descriptor) or os.fstat(descriptor).st_size != buffer.nbytes:
            return False
        if _read(descriptor, buffer, stop) != digest:
            raise OSError(errno.EIO, "its bytes are not read alike each time")
        return True

    def _is_wrong(self, digest: str, descriptor: int) -> bool:
        """Whether the file has other bytes; then it is removed. It is read again, from the disk: the caller's buffer
        may have had the wrong size, and one bad reading must not condemn what may be the only copy."""
        _forget_cached(descriptor)  # the bad bytes may be the kernel's
        if _digest_of(descriptor) == digest:
            return False
        with suppress(OSError):  # the disk may be read-only, or another process faster
            self._room.remove(digest, descriptor)
        return True

    def _note_proven(self, digest: str, inode: int) -> None:
        """This process has written the file durably, or read it back from the disk. Only the last ones are kept,
        because a job saves for weeks."""
        with self._lock:
            self._proven.pop(digest, None)
            self._proven[digest] = inode
            while len(self._proven) > _MOST_PROVEN:
                del self._proven[next(iter(self._proven))]

    def _sync_names(self, digest: str) -> None:
        with self._root.subfolder(digest[:2]) as shard:
            os.fsync(shard)
        os.fsync(self._root.descriptor)


def _fill(slot: Slot, body: memoryview, *, durable: bool) -> None:
    written = 0
    while written < body.nbytes:
        written += os.pwrite(slot.descriptor, body[written:], written)
    if durable:
        os.fsync(slot.descriptor)


def _read(descriptor: int, buffer: memoryview, stop: threading.Event | None) -> str | None:
    """Fills the buffer; SHA-256 of it. None if the file has another size."""
    return read_hashed(descriptor, buffer, stop) if os.fstat(descriptor).st_size == buffer.nbytes else None


def read_hashed(descriptor: int, buffer: memoryview, stop: threading.Event | None, *, start: int = 0) -> str | None:
    """Fills the buffer from `start` of the file on; SHA-256 of it, hashed while it is in the CPU's cache. None if the
    file ends before. Raises TransferStopped, and OSError."""
    hashed, filled = hashlib.sha256(), 0
    while filled < buffer.nbytes:
        check_stop(stop)
        block = buffer[filled : filled + _BLOCK_BYTES]
        count = os.preadv(descriptor, [block], start + filled)
        if count == 0:
            return None
        hashed.update(block[:count])
        filled += count
    return hashed.hexdigest()


def _digest_of(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _forget_cached(descriptor: int) -> None:
    """What is read next comes from the disk, if the file was synced."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _is_whole(descriptor: int, digest: str) -> bool:
    """False also if the disk does not give the file back."""
    try:
        _forget_cached(descriptor)
        return _digest_of(descriptor) == digest
    except OSError:
        return False


def _note_use(descriptor: int) -> None:
    with suppress(OSError):
        os.utime(descriptor)


def _checked(digest: str) -> str:
    if not _DIGEST.match(digest):
        raise ValueError(f"{digest[:80]!r} is no digest")
    return digest
