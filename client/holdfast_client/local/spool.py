"""The spool: saves that are whole on this machine's disk and not known to be committed. Records beside a chunk folder.

spool/<name>.json   a record: every chunk that it names is in the folder, held by the hold of the same name
spool/<name>.new    the claim of a save that is being written, locked by its writer; becomes the record

The order makes a kill at any point harmless: claim, hold, chunks, record; and at the end: record away, hold away.
The next opening of the spool removes a dead process's claim, and a hold without its record.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.local.private_folder import PrivateFolder, open_file, try_lock, unlock
from holdfast_client.local.room import Hold
from holdfast_protocol.base import Digest, LaunchId, Name, RunName
from holdfast_protocol.checkpoints import IndexOrdinals, ShardSummary, Step
from holdfast_protocol.digests import DocumentError, canonical_bytes, parse
from holdfast_protocol.states import CheckpointKind

VERSION: Literal[1] = 1


class SpooledChunk(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: Digest
    bytes: int = Field(ge=0)
    item_bytes: int = Field(default=1, ge=1, description="Bytes of its floating-point numbers, for compression.")


class SpoolRecord(ShardSummary):
    """One rank's shard of one save, as the attempt that staged it would have sealed it: all that begin and seal need.

    A record is a JSON document with its own SHA-256. So a record that a dying disk or a loss of power has torn is
    recognised, and never pushed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = VERSION
    project: Name
    run: Name
    epoch: int = Field(ge=1)
    attempt: int = Field(ge=1)
    launch_id: LaunchId = Field(description="The attempt's: tells it from another one with its number.")
    number: int = Field(ge=1, description="Counts the saves of the attempt, alike on all ranks.")
    step: Step
    kind: CheckpointKind
    world_size: int = Field(ge=1)
    rank: int = Field(ge=0)
    chunks: list[SpooledChunk] = Field(min_length=1, description="By ordinal; the documents among them.")
    index: IndexOrdinals
    host: str
    created_at: datetime

    @property
    def name(self) -> str:
        """The name of its file and its hold: no other save of any rank has it."""
        return record_name(self.launch_id, self.number, self.rank)

    @property
    def run_name(self) -> RunName:
        return RunName(self.project, self.run)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of its distinct chunks."""
        return sum({chunk.digest: chunk.bytes for chunk in self.chunks}.values())

    def encode(self) -> bytes:
        """The inverse of decode_record."""
        body = self.model_dump(mode="json")
        return canonical_bytes({"record": body, "sha256": _digest_of(body)})


def record_name(launch_id: str, number: int, rank: int) -> str:
    return f"spool-{hashlib.sha256(launch_id.encode()).hexdigest()[:32]}-{number}-{rank}"


def decode_record(document: bytes) -> SpoolRecord:
    """Raises DocumentError for a document that is torn, altered, or from a newer version."""
    outer = parse(document)
    if not isinstance(outer, dict) or set(outer) != {"record", "sha256"} or not isinstance(outer["record"], dict):
        raise DocumentError("this is not a record of the spool")
    if _digest_of(outer["record"]) != outer["sha256"]:
        raise DocumentError("this record of the spool was torn or altered")
    if outer["record"].get("version") != VERSION:
        raise DocumentError("a newer version of holdfast has written this record; push it with that one")
    try:
        return SpoolRecord.model_validate(outer["record"])
    except ValidationError as error:
        raise DocumentError(f"this record of the spool has {error.error_count()} fields that do not fit") from None


def _digest_of(body: object) -> str:
    return hashlib.sha256(canonical_bytes(body)).hexdigest()


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
    """The content of the spool, the oldest first."""

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
        """A block that writes one save. Without `keep`, nothing of it stays. Raises OSError."""
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
        """The save is committed, or given up: its chunks may be evicted. May be called twice. Raises OSError."""
        self._unlink(name + _RECORD)
        self.folder.hold(name).release()

    def close(self) -> None:
        """May be called twice. The folder is the caller's."""
        self._root.close()

    def _take(self, name: str) -> int:
        while True:
            descriptor = open_file(name + _CLAIM, os.O_RDWR | os.O_CREAT, self._root.descriptor)
            # Before it was locked, another process may have taken it for a dead one's, and removed it.
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
            # The claim first: it becomes the record, so that a save in progress is seen as the one or the other.
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


@dataclass(frozen=True, order=True)
class SaveKey:
    """One save of one attempt, alike on all its ranks. Sorts by when it was staged."""

    project: str
    run: str
    attempt: int
    number: int
    step: int
    kind: CheckpointKind
    world_size: int
    launch_id: str

    @classmethod
    def of(cls, record: SpoolRecord) -> SaveKey:
        return cls(
            record.project,
            record.run,
            record.attempt,
            record.number,
            record.step,
            record.kind,
            record.world_size,
            record.launch_id,
        )

    @property
    def run_name(self) -> RunName:
        return RunName(self.project, self.run)

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """The ranks of the save that are not among these."""
        return sorted(set(range(self.world_size)).difference(ranks))


@dataclass(frozen=True)
class SpooledSave:
    key: SaveKey
    records: tuple[SpoolRecord, ...]
    """In rank order; not of every rank if the others are on other machines."""


def saves_of(records: Iterable[SpoolRecord]) -> list[SpooledSave]:
    """In the order in which they were staged, run by run."""
    found: dict[SaveKey, dict[int, SpoolRecord]] = defaultdict(dict)
    for record in records:
        found[SaveKey.of(record)][record.rank] = record
    return [
        SpooledSave(key, tuple(by_rank[rank] for rank in sorted(by_rank))) for key, by_rank in sorted(found.items())
    ]


def pushers(holding: Iterable[tuple[int, SaveKey, int]]) -> dict[SaveKey, dict[int, int]]:
    """(rank, save, rank of the save) for all ranks that hold shards -> per save, in order: rank of the save -> the
    lowest rank that holds it."""
    found: dict[SaveKey, dict[int, int]] = defaultdict(dict)
    for who, key, rank in holding:
        found[key][rank] = min(who, found[key].get(rank, who))
    return dict(sorted(found.items()))
