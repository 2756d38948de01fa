"""The spool: saves that are whole on this machine's disk and not known to be committed. Records beside a chunk folder.

spool/<name>.json   a record: every chunk that it names is in the folder, held by the hold of the same name
spool/<name>.new    the claim of a save that is being written, locked by its writer; becomes the record

The order makes a kill at any point harmless: claim, hold, chunks, record; and at the end: record away, hold away. What
a dead process left of a claim, or a hold without its record, goes when the spool is opened next.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.local.holds import Hold
from holdfast_client.local.private_folder import PrivateFolder, open_file, try_lock, unlock
from holdfast_client.local.spool_record import SpoolRecord, decode_record
from holdfast_protocol.canonical_json import DocumentError

FOLDER = "spool"

_RECORD = ".json"
_CLAIM = ".new"
_PREFIX = "spool-"


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be read; its chunks stay until it is dropped."""

    name: str
    problem: str


@dataclass(frozen=True)
class Spooled:
    """What the spool holds, the oldest first."""

    records: tuple[SpoolRecord, ...]
    bad: tuple[BadRecord, ...]


class Claim:
    """One save on its way into the spool. Add the digest of each chunk to `hold` before the chunk to the folder."""

    def __init__(self, root: PrivateFolder, name: str, hold: Hold, descriptor: int) -> None:
        self.hold = hold
        self._root = root
        self._name = name
        self._descriptor = descriptor
        self.kept = False

    def keep(self, record: SpoolRecord) -> None:
        """Durable when this returns: the save is in the spool. Raises OSError."""
        document = memoryview(record.encode())
        written = 0
        while written < document.nbytes:
            written += os.pwrite(self._descriptor, document[written:], written)
        os.fsync(self._descriptor)
        self.hold.add([], durable=True)
        root = self._root.descriptor
        os.rename(self._name + _CLAIM, self._name + _RECORD, src_dir_fd=root, dst_dir_fd=root)
        self.kept = True
        os.fsync(root)


class Spool:
    """Thread-safe, and safe between processes, as the folder is."""

    def __init__(self, folder: ChunkFolder) -> None:
        """Raises OSError, and ConfigurationError if others can write there."""
        self.folder = folder
        self._root = PrivateFolder(folder.path / FOLDER)
        self._sweep()

    @contextmanager
    def claim(self, name: str) -> Iterator[Claim]:
        """A block that writes one save. Left without `keep`, nothing of it stays. Raises OSError."""
        descriptor = self._take(name)
        claim = Claim(self._root, name, self.folder.hold(name), descriptor)
        try:
            yield claim
        finally:
            try:
                if not claim.kept:
                    claim.hold.release()
                    self._unlink(name + _CLAIM)
            finally:
                unlock(descriptor)
                os.close(descriptor)

    def read(self) -> Spooled:
        """Raises OSError."""
        records: list[SpoolRecord] = []
        bad: list[BadRecord] = []
        for file in sorted(os.listdir(self._root.descriptor)):
            name = file.removesuffix(_RECORD)
            if name == file or not name.startswith(_PREFIX):
                continue
            try:
                record = decode_record(self._bytes_of(file))
            except FileNotFoundError:
                continue  # pushed by another process in this moment
            except (DocumentError, OSError) as error:
                bad.append(BadRecord(name, str(error)))
                continue
            if record.name == name:
                records.append(record)
            else:
                bad.append(BadRecord(name, "this record of the spool lies under another's name"))
        records.sort(key=lambda record: (record.project, record.run, record.attempt, record.number, record.rank))
        return Spooled(tuple(records), tuple(bad))

    def forget(self, name: str) -> None:
        """The save is committed, or given up: its chunks may be evicted. Twice is fine. Raises OSError."""
        self._unlink(name + _RECORD)
        self.folder.hold(name).release()

    def close(self) -> None:
        """Twice is fine. The folder is the caller's."""
        self._root.close()

    def _take(self, name: str) -> int:
        while True:
            descriptor = open_file(name + _CLAIM, os.O_RDWR | os.O_CREAT, self._root.descriptor)
            # Between making and locking it, another process may have taken it for a dead one's, and removed it.
            if try_lock(descriptor) and self._is_file(name + _CLAIM, descriptor):
                os.ftruncate(descriptor, 0)
                return descriptor
            os.close(descriptor)

    def _is_file(self, file: str, descriptor: int) -> bool:
        try:
            found = os.stat(file, dir_fd=self._root.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return found.st_ino == os.fstat(descriptor).st_ino

    def _sweep(self) -> None:
        for file in os.listdir(self._root.descriptor):
            if file.endswith(_CLAIM):
                with suppress(OSError):
                    self._remove_if_dead(file)
        for name in self.folder.holds():
            # The claim first: it becomes the record, so that a save in the making is seen as the one or the other.
            if name.startswith(_PREFIX) and not self._exists(name + _CLAIM) and not self._exists(name + _RECORD):
                self.folder.hold(name).release()

    def _remove_if_dead(self, file: str) -> None:
        descriptor = open_file(file, os.O_RDWR, self._root.descriptor)
        try:
            if try_lock(descriptor):
                if self._is_file(file, descriptor):
                    self._unlink(file)
                unlock(descriptor)
        finally:
            os.close(descriptor)

    def _bytes_of(self, file: str) -> bytes:
        with os.fdopen(open_file(file, os.O_RDONLY, self._root.descriptor), "rb") as opened:
            return opened.read()

    def _exists(self, file: str) -> bool:
        try:
            os.stat(file, dir_fd=self._root.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _unlink(self, file: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(file, dir_fd=self._root.descriptor)
            os.fsync(self._root.descriptor)
