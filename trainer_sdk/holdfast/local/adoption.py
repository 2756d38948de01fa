"""Commits earlier attempts' saves from the spool before the restore point is used (rule late-save-adoption).
Collective.

    records of all ranks' folders -> whole saves, the oldest first -> pushed under the new attempt -> committed

Any rank may hold any old rank's shard: the relaunch may have another world size, or its ranks other nodes. A save that
cannot be committed stays in the folder with a warning, and training resumes from the committed ones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from holdfast.distributed.ranks import Ranks
from holdfast.errors import ENDS_THE_JOB
from holdfast.save.job import SaveStats
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import (
    CheckpointAborted,
    CheckpointConflict,
    ChunkCorrupt,
    Conflict,
    HoldfastError,
    IntegrityError,
    InvalidRequest,
    LocalReadFailed,
    ManifestConflict,
    NotFound,
    QuotaExceeded,
    StoreProblem,
    TransferStopped,
)
from holdfast_client.local.push import belongs_here, is_committed, push_late
from holdfast_client.local.spool import SaveKey, SpoolRecord, pushers
from holdfast_client.local.tier import LocalTier
from holdfast_client.shard_writer import worth_another_begin
from holdfast_protocol.base import Fence, RunName
from holdfast_protocol.states import AbortCause, CheckpointState, Health

NOBODY_WANTS_IT = frozenset({AbortCause.JOB, AbortCause.RANK_FAILED})
"""After these the save can never be completed. After any other cause, its bytes are worth their place."""


class Verdict(Enum):
    AGAIN = auto()
    """Service, store or network are at fault, or an operator can fix it: the bytes are safe here, time may help."""
    DROP = auto()
    """It can never be committed, and its handle has said so."""
    LEAVE = auto()
    """This job cannot commit it; maybe the next attempt or a person can."""


def verdict_of(error: BaseException) -> Verdict:
    if isinstance(error, CheckpointAborted):
        if worth_another_begin(error):
            return Verdict.AGAIN
        # Fenced, or its attempt is over: the next attempt may adopt it (rule late-save-adoption).
        return Verdict.DROP if error.context.get("cause") in NOBODY_WANTS_IT else Verdict.LEAVE
    if isinstance(error, CheckpointConflict) and error.context.get("health") == Health.CORRUPT:
        return Verdict.LEAVE  # what was committed is lost, and these bytes may be the only good ones
    if isinstance(error, InvalidRequest) and error.code != type(error).code:
        return Verdict.LEAVE  # a refusal of a newer service, whose meaning a newer client knows
    if isinstance(error, CheckpointConflict | ManifestConflict | InvalidRequest | ChunkCorrupt):
        return Verdict.DROP
    if isinstance(error, HoldfastError) and not isinstance(error, (TransferStopped, *ENDS_THE_JOB)):
        return Verdict.AGAIN
    return Verdict.LEAVE


log = logging.getLogger("holdfast")

STAYS = (Conflict, IntegrityError, InvalidRequest, LocalReadFailed, NotFound, QuotaExceeded, StoreProblem)
"""This save is at fault, or an operator must act: it stays in the spool. Any other error would meet the restore too."""


@dataclass(frozen=True)
class _Held:
    """One rank's message on its folder."""

    saves: list[tuple[SaveKey, int]]
    problems: list[str]


@dataclass(frozen=True)
class _Pushed:
    """The result of one rank's shards of a save. Without a checkpoint it had none, or `problem` says why not."""

    checkpoint_id: str | None = None
    problem: str | None = None


@dataclass
class Adoption:
    """One job's, if any rank has a local tier; all ranks call `adopt`. `fence` is the new attempt."""

    client: Client
    run: RunName
    ranks: Ranks
    workers: TransferWorkers
    tier: LocalTier | None
    stats: SaveStats
    _mine: dict[tuple[SaveKey, int], SpoolRecord] = field(default_factory=dict)

    def adopt(self, fence: Fence) -> list[int]:
        """The steps that are committed now, in order. Raises on all ranks an error that would keep them from restoring
        too."""
        held = self.ranks.together(self._look)
        for torn in dict.fromkeys(problem for each in held for problem in each.problems):
            self._warn(torn)
        adopted: list[int] = []
        told = ((who, key, rank) for who, each in enumerate(held) for key, rank in each.saves)
        for key, pushed_by in pushers(told).items():
            if problem := self._adopt_save(key, pushed_by, fence):
                self._warn(
                    f"step {key.step} of attempt {key.attempt} is in the spool and stays there: {problem.rstrip('.')}. "
                    "`holdfast spool list` shows it; `holdfast spool push` and `holdfast spool drop` settle it."
                )
            else:
                adopted.append(key.step)
                self.stats.committed_late += 1
                if self.ranks.is_first:
                    log.info("committed step %d of attempt %d late, from the spool", key.step, key.attempt)
        return adopted

    def _look(self) -> _Held:
        if self.tier is None:
            return _Held([], [])
        spooled = self.tier.spool.read()
        self._mine = {
            (SaveKey.of(record), record.rank): record for record in spooled.records if record.run_name == self.run
        }
        return _Held(
            list(self._mine), [f"{bad.name} in {self.tier.path} is left alone: {bad.problem}" for bad in spooled.bad]
        )

    def _adopt_save(self, key: SaveKey, pushed_by: Mapping[int, int], fence: Fence) -> str | None:
        """None, or why the save stays. The same on every rank."""
        if not self.ranks.from_first(lambda: belongs_here(self.client, key)):
            return "this service knows another attempt of that number, so it was saved for another one"
        missing = key.missing(pushed_by)
        # A rank that was killed between commit and cleanup leaves only its shard here, which must just be compared.
        if missing and not self.ranks.from_first(lambda: is_committed(self.client, key)):
            return f"no node of this job has the shards of rank {', '.join(map(str, missing[:20]))}"
        mine = [self._mine[key, rank] for rank, who in pushed_by.items() if who == self.ranks.rank]
        results = self.ranks.together(lambda: self._push(mine, fence))
        if problems := [result.problem for result in results if result.problem is not None]:
            return problems[0]
        checkpoint_id = next(result.checkpoint_id for result in results if result.checkpoint_id is not None)
        outcome = self.ranks.from_first(lambda: self.client.checkpoints.get(checkpoint_id))
        if outcome.state is not CheckpointState.COMMITTED:
            return f"it was not committed ({outcome.abort_reason or outcome.state})"
        self.ranks.together(lambda: self._forget(key))
        return None

    def _push(self, records: list[SpoolRecord], fence: Fence) -> _Pushed:
        checkpoint_id = None
        for record in records:
            assert self.tier is not None  # there are records
            try:
                view = push_late(self.client, self.tier.folder, record, fence, workers=self.workers)
            except STAYS as error:
                return _Pushed(problem=str(error))
            checkpoint_id = view.id
        return _Pushed(checkpoint_id)

    def _forget(self, key: SaveKey) -> None:
        for held, record in self._mine.items():
            if held[0] == key and self.tier is not None:
                self.tier.spool.forget(record.name)

    def _warn(self, problem: str) -> None:
        if self.ranks.is_first:
            log.warning("%s", problem)
