"""Whether a store has records that are newer than this catalog: then the database was put back in place from an older
state, which neither its epoch nor its place tells (protocol rule 5). Asked before anything that a checkpoint may need
is deleted: what an older state calls nobody's may belong to a checkpoint that it does not know.

The order is the guard: names are listed first and the catalog is asked afterwards, and a record is written after the
commit that it tells of. Records of an earlier epoch are left out: whoever adopted the store since has decided on them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator

from sqlalchemy import select

from holdfast_protocol.states import CheckpointState
from holdfast_service.catalog.memory import note_change
from holdfast_service.catalog.record_names import FOLDER, RecordKind
from holdfast_service.catalog.record_scan import FoundRecord, scan_records
from holdfast_service.catalog.tables import Checkpoint, Project
from holdfast_service.catalog.went_back import prove_history
from holdfast_service.database import Database
from holdfast_service.errors import WentBackError
from holdfast_service.stores.base import Store, StoreNotOurs

# It is a long listing, and not asked for each deletion. What an earlier answer allows is proven each time instead: the
# database is on the same server as then, and still has the mark that was left when it was asked.
_FRESH_SECONDS = 24 * 3600.0
_AGAIN_SECONDS = 600.0
_ROWS = 500
# While it uploads, and once it is aborted, nothing is beside the data.
_NEVER_RECORDED = (CheckpointState.UPLOADING, CheckpointState.ABORTED)


class NewerRecords:
    """One per opened store and process."""

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
            "restored from an older state. Stop the service, run `holdfast admin new-epoch` and start it; then "
            "`holdfast catalog check` names all of them, `holdfast catalog rebuild` into an empty database brings them "
            "back, and `holdfast store adopt --accept-loss` gives them up."
        )

    def _newer(self, project_id: str) -> Iterator[FoundRecord]:
        found = scan_records(self._store, f"{FOLDER}/{project_id}/{RecordKind.CHECKPOINT}s")
        recorded = (each for each in found.by_subject.values() if each.newest is not None and not each.removed)
        ours = (each for each in recorded if each.versions[0][0] >= self._epoch)
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
