"""What records a store has, found by listing their names, and whether they are newer than this catalog: for a rebuild,
and for the check of a catalog (rule record-outbox)."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from sqlalchemy import select

from holdfast_protocol.states import CheckpointState
from holdfast_service.db.engine import Database, note_change, prove_history
from holdfast_service.db.tables.core import Checkpoint, Project
from holdfast_service.errors import WentBackError
from holdfast_service.records.documents import (
    FOLDER,
    MANIFEST,
    REMOVED,
    DamagedRecordError,
    NewerRecordError,
    Record,
    RecordKind,
    RemovedRecord,
    Subject,
    decode,
    parse_name,
)
from holdfast_service.stores.base import ObjectMissing, ObjectTooLarge, Store, StoreNotOurs


@dataclass
class FoundRecord:
    """The documents of one subject. `versions`: epoch and version of each, the newest first. `remembered`: the newest
    is not in the store; only the database that a rebuild replaces knows it."""

    subject: Subject
    versions: list[tuple[int, int]] = field(default_factory=list)
    manifest: bool = False
    removed: bool = False
    remembered: bool = False

    @property
    def says_anything(self) -> bool:
        """Lists alone name no run and no step: the process that wrote them died before the rest."""
        return bool(self.versions) or self.manifest

    @property
    def newest(self) -> tuple[int, int] | None:
        return self.versions[0] if self.versions else None

    @property
    def newest_name(self) -> str | None:
        return self.subject.version_name(*self.versions[0]) if self.versions else None

    @property
    def written_name(self) -> str | None:
        """The newest that is in the store."""
        versions = self.versions[1:] if self.remembered else self.versions
        return self.subject.version_name(*versions[0]) if versions else None


@dataclass
class FoundRecords:
    """`strange`: names in the folder that no record has."""

    by_subject: dict[Subject, FoundRecord]
    strange: list[str]

    def __iter__(self) -> Iterator[FoundRecord]:
        """What a record builds upon comes before it: projects, runs, checkpoints."""
        order = list(RecordKind)
        return iter(
            sorted(self.by_subject.values(), key=lambda each: (order.index(each.subject.kind), each.subject.folder))
        )


def scan_records(store: Store, folder: str = FOLDER, on_name: Callable[[], None] | None = None) -> FoundRecords:
    """The records of every subject, or of the one that has this folder. Raises StoreError rather than leave one out,
    and what `on_name`, called for each name, raises."""
    found: dict[Subject, FoundRecord] = {}
    strange: list[str] = []
    for name in store.list_named(folder):
        if on_name is not None:
            on_name()
        named = parse_name(name)
        if named is None:
            strange.append(name)
            continue
        record = found.setdefault(named.subject, FoundRecord(named.subject))
        if named.version is not None:
            record.versions.append(named.version)
        elif named.rest == MANIFEST:
            record.manifest = True
        elif named.rest == REMOVED:
            record.removed = True
        elif named.list_digest is None:
            strange.append(name)
    for record in found.values():
        record.versions.sort(reverse=True)
    return FoundRecords(found, strange)


def read_record(store: Store, name: str, model: type[Record]) -> Record:
    """Raises DamagedRecordError, also if the record is not there any more, and other StoreErrors."""
    try:
        return decode(store.read_named(name), model)
    except ObjectMissing:
        raise DamagedRecordError("it is not in the store") from None
    except ObjectTooLarge as error:
        raise DamagedRecordError(str(error)) from None


def is_removed(store: Store, found: FoundRecord) -> bool:
    """Whether a purge is the last word on this checkpoint. A database that was restored from before the purge and then
    claimed the store knows it still, and its record is of a later epoch. Raises StoreError."""
    if not found.removed or found.newest is None:
        return found.removed
    try:
        word = read_record(store, found.subject.removed_name, RemovedRecord)
    except (DamagedRecordError, NewerRecordError):
        return True  # its name says enough
    return word.epoch is None or word.epoch >= found.newest[0]


# It is a long listing, and not asked for each deletion. What an earlier answer allows is proven each time instead: the
# database is on the same server as then, and still has the mark that was left when it was asked.
_FRESH_SECONDS = 24 * 3600.0
_AGAIN_SECONDS = 600.0
_ROWS = 500
# While it uploads, and once it is aborted, nothing is beside the data.
_NEVER_RECORDED = (CheckpointState.UPLOADING, CheckpointState.ABORTED)


class NewerRecords:
    """Whether a store has records that are newer than this catalog; one per opened store and process. If it has, the
    database was restored in place from an older state, which neither its epoch nor its place tells (rule
    fencing-token). The service asks before it deletes anything that a checkpoint may need: bytes without a row in an
    older state may belong to a checkpoint that this state does not know.

    The order is the guard: the service lists the names first and asks the catalog afterwards, and it writes a record
    after the commit that the record tells of. Records of an earlier epoch are left out: the operator who claimed the
    store since has decided on them.
    """

    def __init__(self, database: Database, store: Store, epoch: int) -> None:
        self._database = database
        self._store = store
        self._epoch = epoch
        self._asking = threading.Lock()
        self._ask_again_at = float("-inf")
        self._asked_on: str | None = None
        self.last_problem: str | None = None

    def refuse(self) -> None:
        """Before something is deleted. Raises StoreNotOurs, and StoreError if the store does not tell."""
        with self._asking:
            try:
                server = prove_history(self._database)
            except WentBackError as error:
                raise StoreNotOurs(error.detail) from None
            if server != self._asked_on or time.monotonic() >= self._ask_again_at:
                self._ask()
                self._asked_on = server
            if self.last_problem is not None:
                raise StoreNotOurs(self.last_problem)

    def _ask(self) -> None:
        # Before the listing: a database that has this mark later is not older than the answer.
        with self._database.transaction() as session:
            note_change(session, "the records beside the data were compared")
            projects = session.scalars(select(Project.id).order_by(Project.id)).all()
        self._asked_on = None
        self.last_problem = self.problem(projects)
        seconds = _FRESH_SECONDS if self.last_problem is None else _AGAIN_SECONDS
        self._ask_again_at = time.monotonic() + seconds
        if self.last_problem is not None:
            self._database.note_went_back([self.last_problem.partition(":")[0]])

    def problem(self, project_ids: Iterable[str]) -> str | None:
        """What is wrong and what to do, asked anew of these projects; None if nothing is. Raises StoreError."""
        found = next((each for project_id in project_ids for each in self._newer(project_id)), None)
        if found is None:
            return None
        return (
            f"it has a newer record of the checkpoint {found.subject.subject_id} than this catalog: the database was "
            "restored from an older state. Stop the service, run `holdfast admin raise-epoch` and start it; then "
            "`holdfast catalog check` names all of them, `holdfast catalog rebuild` into an empty database brings them "
            "back, and `holdfast stores claim --accept-loss` gives them up."
        )

    def _newer(self, project_id: str) -> Iterator[FoundRecord]:
        found = scan_records(self._store, f"{FOLDER}/{project_id}/{RecordKind.CHECKPOINT}s")
        recorded = (each for each in found.by_subject.values() if each.newest is not None)
        of_now = (each for each in recorded if each.versions[0][0] >= self._epoch)
        ours = (each for each in of_now if not is_removed(self._store, each))
        while batch := list(itertools.islice(ours, _ROWS)):
            with self._database.read() as session:
                known = session.execute(
                    select(Checkpoint.id, Checkpoint.version).where(
                        Checkpoint.id.in_([each.subject.subject_id for each in batch]),
                        Checkpoint.state.not_in(_NEVER_RECORDED),
                    )
                )
                versions = {row.id: (self._epoch, row.version) for row in known}
            yield from (each for each in batch if each.versions[0] > versions.get(each.subject.subject_id, (0, 0)))
