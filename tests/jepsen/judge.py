"""What is there when everything is quiet: the catalog's rows, every byte of every committed checkpoint, and what the
stores hold that nothing refers to. It asks the database and the stores themselves, so that no part judges itself."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sqlalchemy import func, select

from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError
from holdfast_protocol.states import CheckpointState, Health
from holdfast_protocol.stores import StartSweep
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Attempt, Checkpoint, Run
from tests.jepsen.content import MixedError, WrongError, check_content
from tests.jepsen.journal import Wrong
from tests.jepsen.model import Kept, Model, Verdict
from tests.soak.compare import read_shards
from tests.soak.quiet import Quiet
from tests.support.tallies import drifted_at_last

_READERS = 2
_LOOK_AGAIN_SECONDS = 2.0
_SWEEP_SECONDS = 120


@dataclass(frozen=True)
class _Row:
    id: str
    run: str
    attempt: int
    step: int
    state: CheckpointState
    health: Health
    reason: str | None


class Judge:
    """`context` is a service's of its own, on the same catalog and stores; it runs no controllers."""

    def __init__(self, client: Client, context: ServiceContext, model: Model) -> None:
        self._client = client
        self._context = context
        self._model = model
        self._counted: Counter[str] = Counter()
        self._quiet = Quiet(client, context, self._counted)

    def judge(self, retry_deadline_seconds: float) -> Verdict:
        """`retry_deadline_seconds`: in which everything must come to its end, and every orphan be taken away."""
        try:
            leaks = self._leaks(retry_deadline_seconds)
        except HoldfastError as error:
            leaks = [f"nothing that leaked could be taken away: {type(error).__name__}: {error}"]
        other: list[tuple[Wrong, str]] = []
        with ThreadPoolExecutor(_READERS) as threads:
            rows = self._rows()
            kept = dict(zip((row.id for row in rows), threads.map(lambda row: self._kept(row, other), rows)))
        verdict = self._model.judge(kept)
        verdict.findings += other + [(Wrong.LEAKED, leak) for leak in leaks]
        for what, times in self._counted.items():
            verdict.count(what, times)
        return verdict

    def _leaks(self, retry_deadline_seconds: float) -> list[str]:
        deadline = time.monotonic() + retry_deadline_seconds
        left = [*self._quiet.wait(retry_deadline_seconds), *self._open_attempts()]
        found = [f"not at an end: {what}" for what in left]
        while (orphans := self._quiet.leaked()) and time.monotonic() < deadline:
            # Rows were lost with each failover: what nobody knows may be more than a sweep takes by itself.
            sweep = self._client.operations.wait(
                self._client.sweeps.start(StartSweep(force=True)).id, timeout_seconds=_SWEEP_SECONDS
            )
            if sweep.error is not None:
                return [*found, *orphans, f"a sweep failed: {sweep.error}"]
            time.sleep(_LOOK_AGAIN_SECONDS)
        return [*found, *orphans, *self._quiet.swept(), *drifted_at_last(self._context)]

    def _open_attempts(self) -> list[str]:
        with self._context.database.read() as session:
            count = session.scalar(select(func.count()).select_from(Attempt).where(Attempt.ended_at.is_(None)))
        return [f"{count} attempts without an end"] if count else []

    def _rows(self) -> list[_Row]:
        with self._context.database.read() as session:
            found = session.execute(
                select(Checkpoint, Run.name).join(Run, Run.id == Checkpoint.run_id).order_by(Checkpoint.id)
            )
            return [
                _Row(
                    row.id,
                    name,
                    row.attempt_number,
                    row.step,
                    CheckpointState(row.state),
                    Health(row.health),
                    row.health_reason,
                )
                for row, name in found
            ]

    def _kept(self, row: _Row, other: list[tuple[Wrong, str]]) -> Kept:
        """Reads it where it is committed; what is mixed or wrong in it goes to `other`."""
        if row.state is not CheckpointState.COMMITTED:
            return Kept(row.state)
        try:
            shards = read_shards(self._client, row.id)
            launch = check_content(row.run, row.attempt, row.step, shards)
        except MixedError as error:
            other.append((Wrong.MIXED, f"{row.id}: {error}"))
            return Kept(row.state)
        except WrongError as error:
            other.append((Wrong.WRONG, f"{row.id}: {error}"))
            return Kept(row.state)
        except HoldfastError as error:
            return Kept(row.state, f"{type(error).__name__}: {error}")
        self._counted["bytes compared at the end"] += sum(len(data) for chunks in shards.values() for data in chunks)
        told = self._model.commits.get(row.id)
        if told is not None and told.launch != launch:
            other.append((Wrong.MIXED, f"{told} was told to launch {told.launch} and is launch {launch}'s"))
        if row.health is Health.CORRUPT:
            return Kept(row.state, f"it is marked corrupt, and can be read: {row.reason}")
        return Kept(row.state)
