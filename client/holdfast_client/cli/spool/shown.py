"""What `holdfast spool` prints as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from pydantic import BaseModel

from holdfast_client.local.push_saves import Outcome
from holdfast_client.local.saves import SpooledSave
from holdfast_client.local.spool import BadRecord


class Shown(BaseModel):
    """A save, as far as this folder holds it."""

    project: str
    run: str
    attempt: int
    step: int
    world_size: int
    ranks: list[int]
    bytes: int
    created_at: datetime
    committed: bool = False
    outcome: str = "spooled"

    @classmethod
    def of(cls, save: SpooledSave, outcome: Outcome | None = None) -> Shown:
        shown = cls(
            project=save.key.project,
            run=save.key.run,
            attempt=save.key.attempt,
            step=save.key.step,
            world_size=save.key.world_size,
            ranks=[record.rank for record in save.records],
            bytes=sum(record.chunk_bytes for record in save.records),
            created_at=save.records[0].created_at,
        )
        if outcome is None:
            return shown
        return shown.model_copy(update={"committed": outcome.committed, "outcome": outcome.told})


class ShownBad(BaseModel):
    """A record that cannot be read."""

    name: str
    problem: str


def shown_saves(saves: Iterable[SpooledSave], bad: Iterable[BadRecord]) -> list[BaseModel]:
    return [*(Shown.of(save) for save in saves), *(ShownBad(name=one.name, problem=one.problem) for one in bad)]
