"""Scrubs the copies of given chunks, in every attached store, and mends those that are damaged: what an operation does.

A store that does not answer is left alone from then on and told. What somebody else is at work on is waited for at the
end: their finding is as good as ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.scrub import ScrubMode
from holdfast_protocol.states import CopyState, Proof
from holdfast_service.catalog.audit import Actor
from holdfast_service.catalog.cold_place import can_be_read, is_read_back
from holdfast_service.catalog.copying import LeaseOverError, StoreFailedError
from holdfast_service.catalog.reread import READABLE, Claim, Finding, claim, claim_bad, is_free, let_go
from holdfast_service.catalog.tables import Chunk, Copy
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.scrub.mend_chunk import Damaged, Mended, claim_damaged, mend, put_off
from holdfast_service.scrub.read_copies import lease, read_one
from holdfast_service.scrub.tally import Tally
from holdfast_service.scrub.verify import seems_fine
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
        self._since = since
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
        return copy.bad_at is not None and copy.bad_at < self._since and copy.healed_at is None

    def _count_damage(self, copy: Copy) -> None:
        """Found bad before, or by another: it counts unless it was healed before this operation."""
        if copy.bad_at is None or (copy.healed_at is not None and copy.healed_at < self._since):
            return
        self.copies += 1
        if copy.finding == Finding.MISSING:
            self.missing += 1
        else:
            self.bad += 1

    def _read_since(self, copy: Copy) -> bool:
        if self._mode is not ScrubMode.READ or copy.proof != Proof.READ or copy.state == CopyState.SUSPECT:
            return False
        return copy.verified_at is not None and copy.verified_at >= self._since

    def _read(self, copy_id: int) -> None:
        claimed = self._context.database.run(lambda session: _claim(session, self._context, copy_id))
        if claimed is None:
            self._waiting.append(copy_id)
            return
        spend = self._context.reading_pace.spend
        try:
            bad = claimed.state_before is CopyState.BAD  # what seems fine proves nothing of it
            if self._mode is ScrubMode.METADATA and not bad and seems_fine(self._context, claimed):
                let_go(self._context, claimed)
                self.good += 1
                return
            tally = read_one(self._context, claimed, self._actor, spend)
        except StoreError as error:
            let_go(self._context, claimed)
            self.note_problem(claimed.store_id, error)
            self.unread += 1
            return
        if not tally.settled:  # the lease was lost: whoever has it now finds out
            self._waiting.append(copy_id)
        self.by_store[claimed.store_id].add(tally)
        self.good, self.bad = self.good + tally.good, self.bad + tally.bad
        self.missing += tally.missing

    def _mend(self, chunk_ids: Sequence[int], progress: Progress) -> None:
        """What is damaged of these chunks, each once. What is lost now is left to the round of healing."""
        with self._context.database.read() as session:
            damaged = session.scalars(
                select(Copy.id)
                .where(
                    Copy.chunk_id.in_(chunk_ids),
                    Copy.store_id.in_(self._context.store_ids),
                    Copy.state == CopyState.BAD,
                    Copy.bad_at.is_not(None),
                    Copy.healed_at.is_(None),
                )
                .order_by(Copy.id)
            ).all()
        for copy_id in damaged:
            progress()
            claimed = self._context.database.run(partial(_claim_damaged, context=self._context, copy_id=copy_id))
            if claimed is not None and not self._mend_one(claimed):
                put_off(self._context, claimed)

    def _mend_one(self, damaged: Damaged) -> bool:
        """Whether it is healed."""
        spend = self._context.reading_pace.spend
        try:
            return mend(self._context, damaged, spend, self.by_store[damaged.store_id]) is Mended.HEALED
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
    """None: somebody else is at work on it, or it can be read no longer."""
    if (bad := claim_bad(session, context, copy_id)) is not None:
        return bad
    now = database_now(session)
    row = session.execute(
        select(Copy, Chunk)
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .where(Copy.id == copy_id, is_read_back(context), is_free(now))
        .with_for_update(of=Copy, skip_locked=True)
    ).one_or_none()
    return None if row is None else claim(session, row.Chunk, row.Copy, now + lease(context), suspect=False)


def _claim_damaged(session: Session, context: ServiceContext, copy_id: int) -> Damaged | None:
    copy = session.execute(
        select(Copy)
        .where(
            Copy.id == copy_id,
            Copy.state == CopyState.BAD,
            Copy.healed_at.is_(None),
            is_free(database_now(session)),
        )
        .with_for_update(skip_locked=True)
    ).scalar_one_or_none()
    return None if copy is None else claim_damaged(session, context, copy)
