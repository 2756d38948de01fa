"""Takes the mark from corrupt checkpoints whose chunks are all readable again: uploaded anew, or found by a re-read."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select, text

from holdfast_service.catalog.corruption import heal_if_whole
from holdfast_service.catalog.tables import Checkpoint
from holdfast_service.context import ServiceContext


@dataclass(frozen=True)
class HealReport:
    healed: tuple[str, ...] = ()


def tick(context: ServiceContext) -> HealReport:
    with context.database.read() as session:
        # The text of the partial index, so that it is used.
        corrupt = session.scalars(select(Checkpoint.id).where(text("health = 'corrupt'")).order_by(Checkpoint.id)).all()
    healed = []
    for checkpoint_id in corrupt:
        with context.database.transaction() as session:
            if heal_if_whole(session, checkpoint_id, context.store_ids):
                healed.append(checkpoint_id)
    return HealReport(tuple(healed))
