"""The operation behind `holdfast scrubs start`: reads every copy of a run's or checkpoint's chunks in every attached
store, and repairs what is bad.

    the chunks, a portion at a time: read or look at each copy, then repair what is damaged
      -> take back the marks of what is whole again -> the result

It may be begun again at any point: what was read since the operation was asked for is not read again. A store that does
not answer is left alone from then on and told. The pass waits at the end for copies that another process works on: that
process's finding is as good as its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.copies import ScrubMode, ScrubResult, StartScrub
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import CopyState, Health, Proof
from holdfast_service.audit.record import Actor
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.copy_chunk import LeaseOverError, StoreFailedError
from holdfast_service.copies.predicates import KEPT, can_be_read, is_read_back
from holdfast_service.copies.read_back import READABLE, Claim, Finding, claim_bad, claim_first, copy_is_free, let_go
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, ChunkListEntry, Copy, Project, Run, Shard
from holdfast_service.db.tables.operations import Operation
from holdfast_service.operations.queue import OperationRun, start_operation
from holdfast_service.runs.views import WHOLE, checkpoint_by_id, refuse_unless_whole, run_named
from holdfast_service.scrub.read_copies import Tally, keep_totals, read_one, seems_fine, total_of
from holdfast_service.scrub.repair import Damaged, RepairResult, claim_damaged, defer, repair_copy, unmark
from holdfast_service.stores.base import StoreError

_LOOK_AGAIN_SECONDS = 1.0

Progress = Callable[[], None]


class ChunkScrub:
    """`copies` are all that were met; each is one of good, bad, missing, cold or unread in the end. `by_store` is only
    what this process has read, `marked` the checkpoints that are corrupt by it."""

    def __init__(self, context: ServiceContext, actor: Actor, mode: ScrubMode, since: datetime) -> None:
        self._context = context
        self._actor = actor
        self._mode = mode
        self._since = self._now = since
        self._waiting: list[int] = []
        self._looked_at: set[int] = set()
        self.by_store: dict[int, Tally] = {attached.store_id: Tally() for attached in context.stores}
        self.problems: dict[str, str] = {}
        self.copies = self.good = self.bad = self.missing = self.cold = self.unread = 0

    @property
    def marked(self) -> set[str]:
        return set().union(*(tally.marked for tally in self.by_store.values()))

    def portion(self, chunk_ids: Sequence[int], progress: Progress) -> None:
        """Good copies before others: they keep a chunk's checkpoints from being marked."""
        with self._context.database.read() as session:
            copies = session.scalars(
                select(Copy)
                .where(
                    Copy.chunk_id.in_(chunk_ids),
                    Copy.store_id.in_(self._context.store_ids),
                    Copy.state.in_((*READABLE, CopyState.COLD, CopyState.THAWING, CopyState.BAD)),
                )
                .order_by(Copy.chunk_id, Copy.id)
            ).all()
            self._now = database_now(session)
        for copy in copies:
            progress()
            self._scrub(copy)
        self._mend(chunk_ids, progress)

    def wait_for_the_rest(self, progress: Progress) -> None:
        """Their leases end, whatever becomes of those who hold them."""
        while self._waiting:
            progress()
            waiting, self._waiting = self._waiting, []
            with self._context.database.read() as session:
                copies = session.scalars(select(Copy).where(Copy.id.in_(waiting)).order_by(Copy.id)).all()
                self._now = database_now(session)
            self.copies -= len(waiting)
            for copy in copies:
                self._scrub(copy)
            self._mend([copy.chunk_id for copy in copies], progress)
            if self._waiting:
                self._context.stopping.wait(_LOOK_AGAIN_SECONDS)

    def _scrub(self, copy: Copy) -> None:
        if copy.state == CopyState.BAD and not self._is_worth_a_look(copy):
            self._count_damage(copy)
            return
        self.copies += 1
        if copy.state == CopyState.BAD:
            self._read(copy.id)
            return
        if not can_be_read(self._context, copy):
            self.cold += copy.state in (CopyState.COLD, CopyState.THAWING)
        elif self._read_since(copy):
            self.good += 1
        elif self._role(copy.store_id) in self.problems:
            self.unread += 1
        else:
            self._read(copy.id)

    def _is_worth_a_look(self, copy: Copy) -> bool:
        """What was found bad before this operation was asked for: it may be good by now."""
        if self._role(copy.store_id) in self.problems or copy.id in self._looked_at:
            return False
        self._looked_at.add(copy.id)
        return copy.bad_at is not None and not self._is_since(copy.bad_at) and copy.repaired_at is None

    def _count_damage(self, copy: Copy) -> None:
        """Found bad before, or by another: it counts unless it was repaired before this operation."""
        if copy.bad_at is None or (copy.repaired_at is not None and not self._is_since(copy.repaired_at)):
            return
        self.copies += 1
        if copy.finding == Finding.MISSING:
            self.missing += 1
        else:
            self.bad += 1

    def _read_since(self, copy: Copy) -> bool:
        if self._mode is not ScrubMode.READ or copy.proof != Proof.READ or copy.state == CopyState.SUSPECT:
            return False
        return copy.verified_at is not None and self._is_since(copy.verified_at)

    def _is_since(self, moment: datetime) -> bool:
        """Whether it lies within this operation. What is dated later than now a clock has dated that was ahead, and it
        may have been before."""
        return self._since <= moment <= self._now

    def _read(self, copy_id: int) -> None:
        claimed = self._context.database.run(lambda session: _claim(session, self._context, copy_id))
        if claimed is None:
            self._waiting.append(copy_id)
            return
        acquire = self._context.read_rate_limit.acquire
        try:
            bad = claimed.state_before is CopyState.BAD  # what seems fine proves nothing of it
            if self._mode is ScrubMode.METADATA and not bad and seems_fine(self._context, claimed):
                let_go(self._context, claimed)
                self.good += 1
                return
            tally = read_one(self._context, claimed, self._actor, acquire)
        except StoreError as error:
            let_go(self._context, claimed)
            self.note_problem(claimed.store_id, error)
            self.unread += 1
            return
        if not tally.settled:  # the lease was lost: the process that has it now finds out
            self._waiting.append(copy_id)
        self.by_store[claimed.store_id].add(tally)
        self.good, self.bad = self.good + tally.good, self.bad + tally.bad
        self.missing += tally.missing

    def _mend(self, chunk_ids: Sequence[int], progress: Progress) -> None:
        """What is damaged of these chunks, each once. What is lost now is left to the pass of repairing."""
        with self._context.database.read() as session:
            damaged = session.scalars(
                select(Copy.id)
                .where(
                    Copy.chunk_id.in_(chunk_ids),
                    Copy.store_id.in_(self._context.store_ids),
                    Copy.state == CopyState.BAD,
                    Copy.bad_at.is_not(None),
                    Copy.repaired_at.is_(None),
                )
                .order_by(Copy.id)
            ).all()
        for copy_id in damaged:
            progress()
            claimed = self._context.database.run(partial(_claim_damaged, context=self._context, copy_id=copy_id))
            if claimed is not None and not self._mend_one(claimed):
                defer(self._context, claimed)

    def _mend_one(self, damaged: Damaged) -> bool:
        """Whether it is repaired."""
        acquire = self._context.read_rate_limit.acquire
        try:
            return (
                repair_copy(self._context, damaged, acquire, self.by_store[damaged.store_id]) is RepairResult.REPAIRED
            )
        except StoreFailedError as error:
            self.note_problem(error.store_id, error)
        except (StoreError, LeaseOverError) as error:
            self.note_problem(damaged.store_id, error)
        return False

    def note_problem(self, store_id: int, error: Exception) -> None:
        """From now on that store is not asked any more."""
        self.problems.setdefault(self._role(store_id), str(error))

    def _role(self, store_id: int) -> str:
        return next(attached.role.value for attached in self._context.stores if attached.store_id == store_id)


def _claim(session: Session, context: ServiceContext, copy_id: int) -> Claim | None:
    """None: another process works on it, or it can be read no longer."""
    if (bad := claim_bad(session, context, copy_id)) is not None:
        return bad
    free = copy_is_free(database_now(session))
    seconds = context.settings.chunk_lease_seconds
    return claim_first(session, Copy.id == copy_id, is_read_back(context), free, seconds=seconds)


def _claim_damaged(session: Session, context: ServiceContext, copy_id: int) -> Damaged | None:
    copy = session.execute(
        select(Copy)
        .where(
            Copy.id == copy_id,
            Copy.state == CopyState.BAD,
            Copy.repaired_at.is_(None),
            copy_is_free(database_now(session)),
        )
        .with_for_update(skip_locked=True)
    ).scalar_one_or_none()
    return None if copy is None else claim_damaged(session, context, copy)


_PORTION = 200


def run_scrub(context: ServiceContext, run: OperationRun) -> dict[str, Any]:
    """A ScrubResult. What a store does not answer is told in it, and fails nothing."""
    mode = ScrubMode(run.arguments["mode"])
    with context.database.read() as session:
        since = session.execute(select(Operation.created_at).where(Operation.id == run.id)).scalar_one()
        checkpoint_ids = _checkpoints(session, run)
        chunk_ids = _chunks(session, checkpoint_ids)
    scrub = ChunkScrub(context, run.actor, mode, since)
    try:
        for first in range(0, len(chunk_ids), _PORTION):
            run.progress(done=first, total=len(chunk_ids), note="chunks")
            scrub.portion(chunk_ids[first : first + _PORTION], run.progress)
        run.progress(done=len(chunk_ids), total=len(chunk_ids), note="chunks")
        scrub.wait_for_the_rest(run.progress)
        for checkpoint_id in _corrupt(context, checkpoint_ids | scrub.marked):
            run.progress(note="takes back marks")
            try:
                unmark(context, checkpoint_id, scrub.by_store)
            except StoreFailedError as error:
                scrub.note_problem(error.store_id, error)
    finally:
        keep_totals(context.database, scrub.by_store)
    result = ScrubResult(
        mode=mode,
        copies=scrub.copies,
        good=scrub.good,
        bad=scrub.bad,
        missing=scrub.missing,
        read_bytes=total_of(scrub.by_store).read_bytes,
        repaired=_count_repaired(context, chunk_ids, since),
        lost=_count_lost(context, chunk_ids),
        cold=scrub.cold,
        unread=scrub.unread,
        problems=scrub.problems,
        marked=_names(context, _corrupt(context, checkpoint_ids | scrub.marked)),
    )
    return result.model_dump(mode="json")


def _checkpoints(session: Session, run: OperationRun) -> set[str]:
    if run.checkpoint_id is not None:
        return {run.checkpoint_id}
    return set(
        session.scalars(select(Checkpoint.id).where(Checkpoint.run_id == run.run_id, Checkpoint.state.in_(WHOLE)))
    )


def _chunks(session: Session, checkpoint_ids: Collection[str]) -> list[int]:
    """Each once, however many checkpoints share it."""
    found: set[int] = set()
    for portion in _portions(sorted(checkpoint_ids)):
        lists = select(Shard.chunk_list_id).where(Shard.checkpoint_id.in_(portion))
        found.update(
            session.scalars(select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists)).distinct())
        )
    return sorted(found)


def _corrupt(context: ServiceContext, checkpoint_ids: Collection[str]) -> list[str]:
    found: list[str] = []
    with context.database.read() as session:
        for portion in _portions(sorted(checkpoint_ids)):
            found += session.scalars(
                select(Checkpoint.id).where(Checkpoint.id.in_(portion), Checkpoint.health == Health.CORRUPT)
            )
    return found


def _names(context: ServiceContext, checkpoint_ids: Sequence[str]) -> list[str]:
    names: list[str] = []
    with context.database.read() as session:
        for portion in _portions(checkpoint_ids):
            rows = session.execute(
                select(Project.name, Run.name, Checkpoint.step, Checkpoint.attempt_number)
                .join(Run, Run.project_id == Project.id)
                .join(Checkpoint, Checkpoint.run_id == Run.id)
                .where(Checkpoint.id.in_(portion))
                .order_by(Run.name, Checkpoint.step, Checkpoint.attempt_number)
            )
            names += [f"{project}/{run}@{step}#{attempt}" for project, run, step, attempt in rows]
    return names


def _count_repaired(context: ServiceContext, chunk_ids: Sequence[int], since: datetime) -> int:
    repaired = 0
    with context.database.read() as session:
        for portion in _portions(chunk_ids):
            repaired += (
                session.scalar(
                    select(func.count()).where(
                        Copy.chunk_id.in_(portion), Copy.repaired_at.between(since, database_now(session))
                    )
                )
                or 0
            )
    return repaired


def _count_lost(context: ServiceContext, chunk_ids: Sequence[int]) -> int:
    kept = 0
    with context.database.read() as session:
        for portion in _portions(chunk_ids):
            kept += (
                session.scalar(
                    select(func.count(Copy.chunk_id.distinct())).where(
                        Copy.chunk_id.in_(portion), Copy.store_id.in_(context.store_ids), Copy.state.in_(KEPT)
                    )
                )
                or 0
            )
    return len(chunk_ids) - kept


def _portions(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[first : first + _PORTION] for first in range(0, len(items), _PORTION)]


KIND = "scrub"


def scrub_run(
    context: ServiceContext, caller: Principal, project: str, run: str, request: StartScrub, *, key: str | None
) -> OperationView:
    """Starts a scrub, an operation that any worker carries out, of every checkpoint of the run that is there. Raises
    `forbidden`, `project_not_found` and `run_not_found`."""
    with context.database.transaction() as session:
        owner, found = run_named(session, caller, project, run)
        return start_operation(
            session,
            caller,
            KIND,
            project_id=owner.id,
            run_id=found.id,
            arguments=request.model_dump(mode="json"),
            key=key,
        )


def scrub_checkpoint(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: StartScrub, key: str | None
) -> OperationView:
    """Raises `checkpoint_not_found` and what refuse_unless_whole raises."""
    with context.database.transaction() as session:
        project, run, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        refuse_unless_whole(checkpoint)
        return start_operation(
            session,
            caller,
            KIND,
            project_id=project.id,
            run_id=run.id,
            checkpoint_id=checkpoint.id,
            arguments=request.model_dump(mode="json"),
            key=key,
        )
