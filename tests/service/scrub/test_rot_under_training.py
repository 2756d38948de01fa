"""Objects of the first store are flipped, cut and deleted behind the service's back while a job trains: all is found
and repaired from the second store, and training never notices. Without a second store exactly the right checkpoints are
marked, and a restore takes the newest that is whole."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from sqlalchemy import select

import holdfast
import holdfast_service.replicate.controller
from holdfast_client import ClientSettings
from holdfast_protocol.states import CopyState, StoreRole
from holdfast_service.copies.predicates import object_key
from holdfast_service.db.tables.core import Checkpoint, Chunk, Copy
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.scrub import controller as rescrub
from holdfast_service.scrub import repair
from holdfast_service.scrub import verify as prove
from holdfast_service.settings import ServiceSettings
from tests.service.conftest import Clock
from tests.support.rank import Job, answer, digest_of
from tests.support.rot import ROT, attached, key_of
from tests.support.service import RunningService

STEPS = 8
RUN = "demo/gpt"


@pytest.fixture
def settings(settings: ServiceSettings, tmp_path: Path) -> ServiceSettings:
    """Everything is due to be scrubbed again at once."""
    return settings.model_copy(
        update={
            "second_store": f"posix://{tmp_path / 'second'}",
            "scrub_days": 1e-6,
            "scrub_bytes_per_second": 2**30,
            "prove_bytes_per_second": 2**30,
            "controller_interval_seconds": 0.05,
        }
    )


class Trained:
    """A model of which a part stays as it is and a part changes at every step; what it was at each step."""

    def __init__(self) -> None:
        self.state = {"base": torch.nn.Linear(64, 64), "head": torch.nn.Linear(32, 32), "notes": {"seen": [0]}}
        self.ledger: dict[int, dict[str, torch.Tensor]] = {}

    def step(self, step: int) -> None:
        torch.manual_seed(step)
        with torch.no_grad():
            self.state["head"].weight.copy_(torch.randn(32, 32))
        self.state["notes"]["seen"].append(step)
        self.ledger[step] = self.tensors()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{part}.{name}": tensor.clone()
            for part in ("base", "head")
            for name, tensor in self.state[part].state_dict().items()
        }


class Rot(threading.Thread):
    """Damages objects of the first store that are also in the second one, one a turn, and keeps a ledger."""

    def __init__(self, service: RunningService) -> None:
        super().__init__(name="rot", daemon=True)
        self._service = service
        self._choice = random.Random(4)
        self.ledger: dict[int, str] = {}
        self.turns: queue.Queue[bool] = queue.Queue()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while self.turns.get():
                self._damage_one()
        except BaseException as error:
            self.error = error

    def _damage_one(self) -> None:
        first, second = (attached(self._service, role) for role in (StoreRole.PRIMARY, StoreRole.SECOND))
        with self._service.context.database.read() as session:
            kept = select(Copy.chunk_id).where(Copy.store_id == second.store_id, Copy.state == CopyState.VERIFIED)
            rows = session.execute(
                select(Copy, Chunk.digest)
                .join(Chunk, Chunk.id == Copy.chunk_id)
                .where(
                    Copy.store_id == first.store_id,
                    Copy.state == CopyState.VERIFIED,
                    Copy.id.not_in(self.ledger),
                    Copy.chunk_id.in_(kept.correlate(None)),
                )
            ).all()
        if rows:
            copy, digest = self._choice.choice(rows)
            kind = self._choice.choice(sorted(ROT))
            ROT[kind](first.store, object_key(copy.project_id, digest, copy))
            self.ledger[copy.id] = kind


@contextmanager
def in_the_background(service: RunningService) -> Iterator[Callable[[], None]]:
    """The controllers, pass after pass; what is given does one more pass of each."""
    ended, failures = threading.Event(), []

    def one_round() -> None:
        for controller in (holdfast_service.replicate.controller, prove, rescrub, repair):
            controller.reconcile(service.context)

    def passes() -> None:
        try:
            while not ended.wait(0.1):
                one_round()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=passes, name="operations", daemon=True)
    thread.start()
    try:
        yield one_round
    finally:
        ended.set()
        thread.join(60)
    assert not failures, failures


@pytest.mark.rule("random-generation")
@pytest.mark.parametrize(
    ("database_url", "kind"), [("sqlite", "service"), ("postgres", "s3_service")], indirect=["database_url"]
)
def test_training_never_notices_and_every_checkpoint_restores(
    request: pytest.FixtureRequest, database_url: str, clock: Clock, kind: str
) -> None:
    service: RunningService = request.getfixturevalue(kind)
    service.make_project("demo")
    answer(service.http().put("/v1/projects/demo/policies/copies", json={"document": {}}))
    settings = ClientSettings(url=service.url, token=service.token())
    job, rot = Trained(), Rot(service)
    with in_the_background(service) as one_round:
        rot.start()
        with holdfast.Checkpointer(RUN, create=True, strict=True, client_settings=settings) as ckpt:
            ckpt.restore(job.state)
            for step in range(STEPS):
                job.step(step)
                rot.turns.put(True)  # it strikes some time during this save, or during a later one
                ckpt.save(step, job.state).committed.result(timeout=60)
            assert ckpt.stats.failed == 0
        for _ in range(STEPS):
            one_round()  # training may end before much has a second copy, and only what has one is damaged
            rot.turns.put(True)
        rot.turns.put(False)
        rot.join(60)
    assert rot.error is None
    assert len(rot.ledger) > 5, "it should have done some harm"
    for _ in range(20):
        clock.advance(61)  # what was deferred is due again
        one_round()
        if not unrepaired(service, rot):
            break
    assert unrepaired(service, rot) == {}
    with service.context.database.read() as session:
        marks = session.scalars(select(AuditEvent).where(AuditEvent.action == "checkpoint.mark_corrupt")).all()
        assert not marks, "another store had it all the time"
        assert set(session.scalars(select(Checkpoint.health))) == {"ok"}
    assert_each_good_copy_is_good(service)
    for step, expected in job.ledger.items():
        with holdfast.Checkpointer(RUN, client_settings=settings) as ckpt:
            ckpt.restore(job.state, at=f"{step}#1")
        restored = job.tensors()
        assert restored.keys() == expected.keys()
        assert all(torch.equal(restored[name], tensor) for name, tensor in expected.items()), step


def unrepaired(service: RunningService, rot: Rot) -> dict[int, str]:
    """What was damaged, but for what was found and has another copy that was read."""
    with service.context.database.read() as session:
        rows = session.scalars(select(Copy).where(Copy.id.in_(rot.ledger))).all()
    return {copy.id: f"{rot.ledger[copy.id]}, {copy.state}" for copy in rows if copy.repaired_at is None}


def assert_each_good_copy_is_good(service: RunningService) -> None:
    with service.context.database.read() as session:
        rows = session.execute(
            select(Copy, Chunk.digest).join(Chunk, Chunk.id == Copy.chunk_id).where(Copy.state == CopyState.VERIFIED)
        ).all()
    for copy, digest in rows:
        store = service.context.store_of(copy.store_id)
        assert store is not None
        assert digest_of(b"".join(store.open_read(object_key(copy.project_id, digest, copy)))) == digest


def test_without_another_store_exactly_the_right_checkpoints_are_marked_by_name(
    settings: ServiceSettings, service: RunningService, clock: Clock
) -> None:
    choice = random.Random(7)
    contents = [f"part {number} of the state".encode() * 50 for number in range(24)]
    job = Job(service.http())
    ledger: dict[int, list[bytes]] = {}
    names: dict[int, str] = {}
    for step in range(1, 13):
        ledger[step] = [*choice.sample(contents[: 8 + step], 4), f"index {step}".encode()]
        save = job.begin(step)
        save.write(0, ledger[step])
        names[step] = save.id
    # Neither every checkpoint nor none of the newest is to be hit.
    lost = choice.sample([content for content in contents if content in ledger[12] or content in ledger[11]], 2)
    expected = {step for step, needed in ledger.items() if set(lost) & set(needed)}
    assert expected
    assert expected != set(ledger)
    for content, damage in zip(lost, ("flipped", "deleted"), strict=True):
        ROT[damage](service.context.store, key_of(service, content))
    clock.advance(86400)
    assert set(rescrub.reconcile(service.context).corrupt_checkpoints) == {names[step] for step in expected}
    listed = answer(service.http().get(f"{job.base}/checkpoints", params={"health": "corrupt", "limit": 100}))
    assert {view["step"] for view in listed["items"]} == expected
    for view in listed["items"]:
        assert any(digest_of(content) in view["health_reason"] for content in lost)
    decision = answer(service.http().get(f"{job.base}/restore-point"))
    newest_whole = max(set(ledger) - expected)
    assert decision["restore_point"]["step"] == newest_whole
    assert {seen["step"] for seen in decision["skipped"]} == {step for step in expected if step > newest_whole}
