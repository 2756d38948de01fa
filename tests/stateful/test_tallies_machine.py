"""Whatever happens in whichever order, the sums are those of the rows: all bytes and all checkpoints at every moment,
and what bytes are kept for once the controller has taken up what has changed. Two runs share their chunks, and the
controller may be anywhere in its work, or die in it."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, update

from holdfast_protocol.states import CopyState
from holdfast_service.collect import controller as collect
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Copy
from holdfast_service.tallies import fold, recount
from tests.service.conftest import Clock, clock
from tests.stateful.conftest import PROFILE
from tests.support.rank import Job, Refused, Save, answer
from tests.support.retention import purge
from tests.support.service import RunningService
from tests.support.tallies import check_exact_sums, drifted, kept, take_up, true

__all__ = ["clock"]

_steps = itertools.count(1)


class _Scene:
    """What the actions work on. Numbers pick among what is there."""

    def __init__(self, service: RunningService, clock: Clock) -> None:
        self.service = service
        self.clock = clock
        self.http = service.http()
        mark = secrets.token_hex(4)
        self.project = f"p-{mark}"
        service.make_project(self.project)
        self.chunks = [f"{mark} {number} ".encode() * (number + 1) for number in range(6)]
        self.jobs = [Job(self.http, f"{self.project}/{name}") for name in ("gpt", "tuned")]
        self.open: list[tuple[Save, list[bytes]]] = []
        self.saved: list[str] = []
        self.holds: list[str] = []

    def begin(self, run: int, chunk: int) -> None:
        save = self.jobs[run % 2].begin(next(_steps))
        chunks = [self.chunks[chunk % 6], self.chunks[(chunk * 5 + 1) % 6], f"index {save.id}".encode()]
        save.upload(0, chunks)
        self.open.append((save, chunks))

    def negotiate(self, which: int, chunk: int) -> None:
        """And never sent, or not sealed."""
        if self.open:
            self.open[which % len(self.open)][0].negotiate(0, [self.chunks[chunk % 6]])

    def seal(self, which: int, leave_out: int) -> None:
        if self.open:
            save, chunks = self.open.pop(which % len(self.open))
            save.seal(0, chunks if leave_out % 2 else chunks[1:])
            self.saved.append(save.id)

    def abort(self, which: int, _: int) -> None:
        if self.open:
            self.open.pop(which % len(self.open))[0].abort()

    def save(self, run: int, chunk: int) -> None:
        self.begin(run, chunk)
        self.seal(len(self.open) - 1, 1)

    def _post(self, which: int, path: str, **body: Any) -> Any:
        return answer(self.http.post(f"/v1/checkpoints/{self._one(which)}/{path}", json=body))

    def _one(self, which: int) -> str:
        return self.saved[which % len(self.saved)] if self.saved else "ck_none"

    def prune(self, which: int, run: int) -> None:
        path = f"/v1/projects/{self.project}/runs/{('gpt', 'tuned')[run % 2]}/retention/prune"
        answer(self.http.post(path, json={"checkpoint_ids": [self._one(which)], "reason": "old"}))

    def undelete(self, which: int, _: int) -> None:
        self._post(which, "undelete")

    def pin(self, which: int, ends: int) -> None:
        body: dict[str, Any] = {"reason": "paper"}
        if ends % 2:
            body["expires_in_seconds"] = 100 * ends
        answer(self.http.put(f"/v1/checkpoints/{self._one(which)}/pin", json=body))

    def unpin(self, which: int, _: int) -> None:
        answer(self.http.delete(f"/v1/checkpoints/{self._one(which)}/pin"))

    def hold(self, which: int, ends: int) -> None:
        body: dict[str, Any] = {"retain_until": self._later(100 * ends)} if ends % 2 else {}
        self.holds.append(self._post(which, "holds", reason="evidence", **body)["id"])

    def release(self, which: int, _: int) -> None:
        if self.holds:
            answer(self.http.post(f"/v1/holds/{self.holds[which % len(self.holds)]}/release", json={"reason": "over"}))

    def _later(self, seconds: int) -> str:
        with self.service.context.database.read() as session:
            return (database_now(session) + timedelta(seconds=seconds)).isoformat()

    def state(self, which: int, state: int) -> None:
        """As a statement of a controller or a rebuild may leave it."""
        wanted = ("trashed", "committed", "deleting", "deleted")[state % 4]
        with self.service.context.database.transaction() as session:
            session.execute(
                update(Checkpoint)
                .where(Checkpoint.id == self._one(which), Checkpoint.committed_at.is_not(None))
                .values(state=wanted)
            )

    def copy(self, which: int, what: int) -> None:
        """As repairing, cooling, thawing, scrubbing and collecting change one."""
        changes: list[dict[str, Any]] = [
            *({"state": state} for state in ("cold", "thawing", "verified", "suspect", "bad", "deleting", "gone")),
            {"stored_bytes": which + 7},
            {"storage_class": "archive"},
            {"storage_class": None},
        ]
        with self.service.context.database.transaction() as session:
            ids = session.scalars(select(Copy.id).order_by(Copy.id.desc()).limit(8)).all()
            if ids:
                chosen = Copy.id == ids[which % len(ids)]
                session.execute(update(Copy).where(chosen).values(changes[what % len(changes)]))

    def second_copy(self, which: int, whole: int) -> None:
        with self.service.context.database.transaction() as session:
            found = session.scalars(select(Copy).order_by(Copy.id.desc()).limit(8)).all()
            if not found:
                return
            old = found[which % len(found)]
            values = {
                column.name: getattr(old, column.name)
                for column in Copy.__table__.c
                if column.name not in ("id", "counted")
            }
            state = CopyState.VERIFIED if whole % 2 else CopyState.COPYING
            session.add(Copy(**values | {"generation": secrets.token_hex(16), "state": state}))

    def purge(self, *_: int) -> None:
        self.clock.advance(40 * 24 * 3600)
        purge(self.service)

    def collect(self, *_: int) -> None:
        self.clock.let_tickets_expire(self.service.context.settings)
        collect.reconcile(self.service.context)

    def wait(self, hundreds: int, _: int) -> None:
        self.clock.advance(100 * hundreds)

    def fold(self, *_: int) -> None:
        fold.fold(self.service.context)

    def expand(self, *_: int) -> None:
        self.service.context.database.run(recount._expand)

    def recount(self, *_: int) -> None:
        self.service.context.database.run(recount._recount_marked)

    def die(self, where: int, _: int) -> None:
        """The controller, right before it commits."""
        work: list[Callable[..., Any]] = [
            fold._fold_bytes,
            fold._fold_checkpoints,
            recount._expand,
            recount._recount_marked,
        ]
        with suppress(ZeroDivisionError), self.service.context.database.transaction() as session:
            work[where % len(work)](session)
            raise ZeroDivisionError

    def take_up(self, *_: int) -> None:
        take_up(self.service)


_ACTIONS = [name for name in vars(_Scene) if not name.startswith("_")]
_numbers = st.integers(0, 11)


@pytest.mark.races
@settings(
    PROFILE,
    max_examples=PROFILE.max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(st.lists(st.tuples(st.sampled_from(_ACTIONS), _numbers, _numbers), max_size=20))
def test_the_sums_are_those_of_the_rows(
    service: RunningService, clock: Clock, actions: list[tuple[str, int, int]]
) -> None:
    scene = _Scene(service, clock)
    for action, first, second in [("save", 0, 0), ("save", 1, 0), ("save", 0, 3), *actions]:
        try:
            getattr(scene, action)(first, second)
        except Refused as refused:  # by a rule of the service
            if refused.code == "invalid_request":  # which is none: the action does nothing
                raise
        check_exact_sums(service, scene.project)
    take_up(service)
    assert kept(service, scene.project) == true(service, scene.project)
    check_exact_sums(service, scene.project)
    take_up(service, whole=True)
    assert drifted(service) == 0
    assert kept(service) == true(service)
