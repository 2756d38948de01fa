"""The room of a chunk folder: how much is used, and the digests that eviction must never touch."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from holdfast_client.local.private_folder import PrivateFolder, open_file, try_lock, unlock, wait_until
from holdfast_protocol.digests import DIGEST_PATTERN

FOLDER = "holds"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")
_DIGEST = re.compile(DIGEST_PATTERN)


class Hold:
    """A named set of digests that eviction must never touch: a file of the chunk folder, so that it survives kill -9.
    `ChunkFolder.hold` gives it. It lasts until `release`, by any process.

    Add a digest before you look for its chunk. Adding and evicting both happen under the folder's lock: in the other
    order, another process could evict the chunk between the look and the hold."""

    def __init__(self, folder: PrivateFolder, locked: Callable[[], AbstractContextManager[object]], name: str) -> None:
        if not _NAME.match(name):
            raise ValueError(f"{name!r} is no name for a hold")
        self._folder = folder
        self._locked = locked
        self.name = name

    def add(self, digests: Iterable[str], *, durable: bool = False) -> None:
        """Held when this returns; `durable`: also after a loss of power. Idempotent. Raises OSError."""
        lines = "".join(f"{digest}\n" for digest in digests)
        with ExitStack() as stack:
            folder = stack.enter_context(self._folder.subfolder(FOLDER, make=True))
            with self._locked():
                descriptor = open_file(self.name, os.O_RDWR | os.O_CREAT, folder)
                stack.callback(os.close, descriptor)
                size = os.fstat(descriptor).st_size
                # A full disk may have torn the last line. It must not spoil the next one.
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                left = memoryview((("\n" if torn else "") + lines).encode("ascii"))
                while left:
                    written = os.pwrite(descriptor, left, size)
                    left, size = left[written:], size + written
            if durable:
                # A busy disk takes long over it, and others wait for the lock no longer than _LOCK_SECONDS.
                for each in (descriptor, folder, self._folder.descriptor):
                    os.fsync(each)

    def digests(self) -> set[str]:
        """Its digests; none if it was never added to, or was released."""
        try:
            with self._folder.subfolder(FOLDER) as folder:
                return _read(folder, self.name)
        except FileNotFoundError:
            return set()

    def release(self) -> None:
        """From now on its chunks may be evicted, unless another hold has them. May be called twice."""
        with self._locked(), suppress(FileNotFoundError), self._folder.subfolder(FOLDER) as folder:
            os.unlink(self.name, dir_fd=folder)


def hold_names(root: PrivateFolder) -> list[str]:
    try:
        with root.subfolder(FOLDER) as folder:
            return sorted(name for name in os.listdir(folder) if _NAME.match(name))
    except FileNotFoundError:
        return []


def held_digests(root: PrivateFolder) -> set[str]:
    """The digests of all holds, under the folder's lock. Raises OSError: what cannot be read there must stop
    eviction."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(root.subfolder(FOLDER))
        except FileNotFoundError:
            return set()
        return set().union(*(_read(folder, name) for name in os.listdir(folder)))


def _read(folder: int, name: str) -> set[str]:
    with open(open_file(name, os.O_RDONLY, folder), encoding="ascii", errors="replace") as file:
        return {line for line in file.read().splitlines() if _DIGEST.match(line)}


INCOMING = "incoming"
LEDGER = "ledger"

_SHARD = re.compile(r"[0-9a-f]{2}\Z")
_LEDGER_DIGITS = 20
_LOCK_SECONDS = 30.0
"""The lock is held for milliseconds; a process that is stopped while it has it must not stop the others for good."""
_SPARE_PART = 16
"""Eviction frees this part of the limit more than it must, so that not each chunk pays for counting the folder."""


class Ledger:
    """The bytes used, as in the locked file. An unreadable file says 0: opening counts again."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def used(self) -> int:
        text = os.pread(self._descriptor, _LEDGER_DIGITS, 0)
        return int(text) if text.isdigit() else 0

    @used.setter
    def used(self, used: int) -> None:
        os.pwrite(self._descriptor, b"%0*d" % (_LEDGER_DIGITS, max(0, used)), 0)


@dataclass(frozen=True)
class Slot:
    """Reserved room: a file as long as the chunk, locked by its writer as long as `descriptor` is open."""

    name: str
    descriptor: int
    bytes: int


class _Stored(NamedTuple):
    """Sorts by last use."""

    used_at_ns: int
    digest: str
    bytes: int


class Room:
    """How much room one folder has: its files are counted, room is reserved, and the longest unused chunks are evicted.
    Every process that uses the folder has one.

    The ledger, a small file, is the folder's lock and tells the bytes used. It is raised before bytes are written and
    lowered after they are gone, so a crash leaves it too high and never too low. Opening the folder and evicting count
    again."""

    def __init__(self, root: PrivateFolder, limit_bytes: int) -> None:
        self._root = root
        self.limit_bytes = limit_bytes

    @contextmanager
    def locked(self) -> Iterator[Ledger]:
        """The folder's lock, for threads too. Raises TimeoutError (an OSError) if another process has it for too
        long."""
        descriptor = open_file(LEDGER, os.O_RDWR | os.O_CREAT, self._root.descriptor)
        try:
            if not wait_until(lambda: try_lock(descriptor), _LOCK_SECONDS):
                raise TimeoutError(f"the chunk folder {self._root.path} has been locked for {_LOCK_SECONDS:.0f} s")
            try:
                yield Ledger(descriptor)
            finally:
                unlock(descriptor)
        finally:
            os.close(descriptor)

    def tidy(self) -> int:
        """Removes the unfinished files of dead processes, and counts. Returns the bytes used. A living writer locks its
        file before it releases the ledger."""
        with self.locked() as ledger:
            with suppress(FileNotFoundError), self._root.subfolder(INCOMING) as incoming:
                for name in os.listdir(incoming):
                    with suppress(OSError):
                        _remove_if_dead(incoming, name)
            ledger.used = used = self._count()[1]
        return used

    def reserve(self, size: int) -> Slot | None:
        """None if there is no room, also after eviction. Raises OSError."""
        with self.locked() as ledger:
            if ledger.used + size > self.limit_bytes:
                ledger.used = self._evict(self.limit_bytes - size)
            if ledger.used + size > self.limit_bytes:
                return None
            with self._root.subfolder(INCOMING, make=True) as incoming:
                name = secrets.token_hex(16)
                descriptor = open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, incoming)
                try:
                    try_lock(descriptor)
                    # Its full length at once, so that a process that counts the folder meanwhile counts it whole.
                    os.ftruncate(descriptor, size)
                    ledger.used += size
                except BaseException:
                    os.unlink(name, dir_fd=incoming)
                    os.close(descriptor)
                    raise
            return Slot(name, descriptor, size)

    def discard(self, slot: Slot) -> None:
        with self.locked() as ledger, suppress(FileNotFoundError), self._root.subfolder(INCOMING) as incoming:
            os.unlink(slot.name, dir_fd=incoming)
            ledger.used -= slot.bytes

    def publish(self, slot: Slot, digest: str, *, durable: bool) -> None:
        """The slot's file becomes the chunk's, in place of any file of that name. One that is not durable goes instead
        if the chunk is there: that file may be durable, and a save may rely on it."""
        with (
            self.locked() as ledger,
            self._root.subfolder(INCOMING) as incoming,
            self._root.subfolder(digest[:2], make=True) as shard,
        ):
            there = _bytes_of(digest, shard)
            if not durable and there == slot.bytes:
                os.unlink(slot.name, dir_fd=incoming)
                ledger.used -= slot.bytes
                return
            os.rename(slot.name, digest, src_dir_fd=incoming, dst_dir_fd=shard)
            ledger.used -= there or 0

    def remove(self, digest: str, descriptor: int) -> None:
        """Removes the chunk's file, if it is still the one that is open here."""
        with self.locked() as ledger, self._root.subfolder(digest[:2]) as shard:
            found = os.stat(digest, dir_fd=shard, follow_symlinks=False)
            if found.st_ino == os.fstat(descriptor).st_ino:
                os.unlink(digest, dir_fd=shard)
                ledger.used -= found.st_size

    def free(self, size: int) -> bool:
        """For a disk that is full before the limit is reached. False if no chunk may be evicted."""
        with self.locked() as ledger:
            used = self._count()[1]
            ledger.used = self._evict(max(0, used - size))
            return ledger.used < used

    def _evict(self, goal_bytes: int) -> int:
        """Oldest use first, until the folder has at most `goal_bytes`, and a little less. Returns the bytes that
        remain."""
        stored, used = self._count()
        if used <= goal_bytes:
            return used
        held = held_digests(self._root)
        for chunk in sorted(stored):
            if used <= goal_bytes - self.limit_bytes // _SPARE_PART:
                break
            if chunk.digest not in held:
                with self._root.subfolder(chunk.digest[:2]) as shard:
                    os.unlink(chunk.digest, dir_fd=shard)
                used -= chunk.bytes
        return used

    def _count(self) -> tuple[list[_Stored], int]:
        """All chunks, and the bytes of them and of files that are being written."""
        stored: list[_Stored] = []
        for name in filter(_SHARD.match, os.listdir(self._root.descriptor)):
            with suppress(OSError), self._root.subfolder(name) as shard:
                for digest in filter(_DIGEST.match, os.listdir(shard)):
                    found = os.stat(digest, dir_fd=shard, follow_symlinks=False)
                    stored.append(_Stored(found.st_mtime_ns, digest, found.st_size))
        used = sum(chunk.bytes for chunk in stored)
        with suppress(FileNotFoundError), self._root.subfolder(INCOMING) as incoming:
            used += sum(_bytes_of(name, incoming) or 0 for name in os.listdir(incoming))
        return stored, used


def _remove_if_dead(incoming: int, name: str) -> None:
    descriptor = open_file(name, os.O_RDONLY, incoming)
    try:
        if try_lock(descriptor):
            os.unlink(name, dir_fd=incoming)
            unlock(descriptor)
    finally:
        os.close(descriptor)


def _bytes_of(name: str, folder: int) -> int | None:
    """None: it is not there."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    except FileNotFoundError:
        return None
