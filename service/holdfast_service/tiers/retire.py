"""Takes the hot copies of chunks away that have a settled copy in a colder place (protocol rules 15, 21 and 28).

The locks are the guard: all users of the chunks, then the chunks, which a negotiation excludes; only then, in later
statements, it is asked again who wants them hot. In the same transaction the copy becomes `deleting`, so that nobody is
told `present` or given a URL any more, and the checkpoints become cold, so that nobody is told to restore them. Its
bytes stay until the last issued URL has run out: `leased_until` is that moment, and the collector deletes what is
`deleting` and leased by nobody. A process that dies before the commit has changed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState
from holdfast_service.catalog.audit import Actor
from holdfast_service.catalog.corruption import lock_users
from holdfast_service.catalog.going_cold import mark_cold
from holdfast_service.catalog.memory import note_change
from holdfast_service.catalog.tables import Chunk, Copy
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.tiers.movable import Place, hotter_copy, in_use, may_be_left, wanted_hotter

CONTROLLER = Actor.controller("tiers")


@dataclass(frozen=True)
class Retired:
    copies: int = 0
    bytes: int = 0
    cold_checkpoints: tuple[str, ...] = ()


def retire(context: ServiceContext, there: Mapping[int, int], place: Place) -> Retired:
    """Of these chunks, what may go now. Each has the copy in the place that was made, or looked at, just now.
    Repeatable."""
    return context.database.run(lambda session: _retire(session, context, there, place))


def _retire(session: Session, context: ServiceContext, there: Mapping[int, int], place: Place) -> Retired:
    lock_users(session, *there)
    locked = session.scalars(
        select(Chunk.id).where(Chunk.id.in_(there.keys())).order_by(Chunk.digest).with_for_update()
    ).all()
    # The copies in the place as well: none is found bad between the look at it and the end of this.
    session.execute(select(Copy.id).where(Copy.chunk_id.in_(locked)).order_by(Copy.id).with_for_update()).all()
    now = database_now(session)
    # A later statement: it sees what the others committed while this waited for the locks.
    copies = session.scalars(
        select(Copy)
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .where(
            Chunk.id.in_(locked),
            hotter_copy(context, place),
            may_be_left(place, now, tuple(there.values())),
            ~wanted_hotter(place),
            ~in_use(context, place, now),
        )
        .order_by(Copy.id)
        .with_for_update(of=Copy),
        execution_options={"populate_existing": True},
    ).all()
    # Whoever was given a URL for it just now may use it for so long.
    outlived_at = now + timedelta(seconds=context.settings.ticket_seconds)
    for copy in copies:
        copy.state = CopyState.DELETING
        copy.leased_until = outlived_at
    if copies:
        note_change(session, f"{len(copies)} copies were left for colder ones")
    session.flush()
    gone = {copy.chunk_id for copy in copies}
    cold: list[str] = []
    if gone and place.is_cold:
        cold = mark_cold(session, gone, context.store_ids, actor=CONTROLLER, target=place.target)
    return Retired(len(copies), sum(copy.stored_bytes for copy in copies), tuple(cold))
