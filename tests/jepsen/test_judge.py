"""The judge finds what it is there for: each kind of fault is planted, around the service, and named."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import text, update

from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_protocol.runs import parse_run
from holdfast_protocol.states import CheckpointState
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Copy
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings
from tests.jepsen.content import MixedError, Saved, WrongError, check_content
from tests.jepsen.job import Job
from tests.jepsen.journal import Journal, Wrong
from tests.jepsen.judge import Judge
from tests.jepsen.model import Kept, Model, Verdict
from tests.soak.fleet import SETTINGS
from tests.soak.quiet import Quiet
from tests.support.damage import files_of, flip
from tests.support.serve import holdfast_serve

_QUIET_SECONDS = 240
# Else copies are being read, under leases, whenever a slow machine looks.
_SETTINGS = SETTINGS | {"HOLDFAST_SCRUB_DAYS": "1"}
RUN = "jepsen/planted"


class World:
    """A served Holdfast on a folder; what a job saved there, by step, and a catalog to plant faults in."""

    def __init__(self, folder: Path, client: Client, context: ServiceContext, journal: Journal) -> None:
        self.store = folder / "data" / "store"
        self.context = context
        self.client = client
        self._journal = journal

    def launch(self, *steps: int) -> None:
        job = Job(self.client, parse_run(RUN), self._journal, random.Random(steps[0]))
        job.resume()
        for step in steps:
            job.save(step)
        job.end()

    def id_of(self, step: int) -> str:
        (found,) = (each.checkpoint_id for each in Model(self._journal, {}).commits.values() if each.step == step)
        return found

    def file_of(self, step: int, rank: int) -> Path:
        """Of the last chunk of that shard: no other save has it."""
        digest = self.client.checkpoints.shard_chunks(self.id_of(step), rank).chunks[-1].digest
        (found,) = files_of(self.store, digest)
        return found

    def change(self, statement: str, **values: object) -> None:
        with self.context.database.transaction() as session:
            assert session.execute(text(statement), values).rowcount == 1

    def judge(self, retry_deadline_seconds: float) -> Verdict:
        return Judge(self.client, self.context, Model(self._journal, {})).judge(retry_deadline_seconds)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("planted")
    with holdfast_serve(folder, other_settings=_SETTINGS) as served:
        token = (folder / "data" / "token").read_text().strip()
        settings = ClientSettings(url=served.url, token=SecretStr(token), direct_files=False)
        context = open_service(ServiceSettings(data_dir=folder / "data"))
        journal = Journal(folder)
        try:
            with Client(settings) as client:
                world = World(folder, client, context, journal)
                world.launch(1, 2, 3, 4, 5)
                world.launch(6, 7)
                yield world
        finally:
            journal.close()
            close_service(context)


@pytest.fixture(scope="module")
def clean(world: World) -> Verdict:
    """Before anything is planted."""
    return world.judge(_QUIET_SECONDS)


@pytest.fixture(scope="module")
def planted(world: World, clean: Verdict) -> Verdict:
    """Everything at once. There is no time for anything to be fixed."""
    world.file_of(1, rank=0).unlink()
    flip(world.file_of(2, rank=1))
    of = "checkpoint_id = :id AND rank = 1"
    other = f"(SELECT chunk_list_id FROM shards WHERE {of.replace(':id', ':other')})"
    world.change(
        f"UPDATE shards SET chunk_list_id = {other} WHERE {of}",
        id=world.id_of(3),
        other=world.id_of(6),
    )
    world.change("UPDATE checkpoints SET step = 44 WHERE id = :id", id=world.id_of(4))
    world.change("UPDATE checkpoints SET state = 'aborted' WHERE id = :id", id=world.id_of(5))
    there = world.file_of(7, rank=0)
    shutil.copy(there, there.with_name("0" * 32))
    return world.judge(0)


def test_an_undisturbed_world_has_four_zeros(clean: Verdict) -> None:
    assert not clean.findings
    assert clean.facts["commits told, and restored at the end"] == 7


@pytest.mark.parametrize(
    ("wrong", "step", "says"),
    [
        pytest.param(Wrong.LOST, 1, "cannot be restored", id="an object that was deleted behind the service"),
        pytest.param(Wrong.LOST, 2, "cannot be restored", id="one bit of an object"),
        pytest.param(Wrong.MIXED, 3, "rank 1 of launch", id="a shard of another launch"),
        pytest.param(Wrong.WRONG, 4, "holds the bytes of", id="another step than the one that was saved"),
        pytest.param(Wrong.LOST, 5, "is aborted", id="a commit that was taken back"),
    ],
)
def test_what_was_planted_is_found(world: World, planted: Verdict, wrong: Wrong, step: int, says: str) -> None:
    found = [what for each, what in planted.findings if each is wrong and world.id_of(step) in what]
    assert len(found) == 1, planted.findings
    assert says in found[0]


def test_an_object_that_no_row_knows_is_a_leak(planted: Verdict) -> None:
    leaks = [what for wrong, what in planted.findings if wrong is Wrong.LEAKED]
    assert any("0" * 32 in what and "which no row knows" in what for what in leaks), leaks


@pytest.mark.usefixtures("planted")
def test_what_nothing_needs_is_a_leak_unless_its_ticket_is_of_a_clock_that_was_ahead(world: World) -> None:
    def told_with_tickets_until(moment: datetime) -> bool:
        with world.context.database.transaction() as session:
            session.execute(update(Copy).values(ticket_expires_at=moment))
        return any("that nothing needs" in left for left in Quiet(world.client, world.context, Counter()).on_the_way())

    world.launch(8)
    now = datetime.now(UTC)
    told_with_tickets_until(now + timedelta(days=1000))  # before anything may be collected
    world.change("UPDATE checkpoints SET state = 'aborted' WHERE id = :id", id=world.id_of(8))
    assert not told_with_tickets_until(now + timedelta(days=1000))
    assert told_with_tickets_until(datetime.now(UTC))


# The model by itself: what a commit's absence means.


def _commit(journal: Journal, checkpoint_id: str, step: int, *, run: str = "r", after_fence: bool = False) -> None:
    journal.committed(checkpoint_id, run, "launch", 1, step, 0.0, after_fence)


def _findings(journal: Journal, kept: dict[str, Kept], keep_last: dict[str, int] | None = None) -> list[Wrong]:
    return [wrong for wrong, _ in Model(journal, keep_last or {}).judge(kept).findings]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path)
    yield journal
    journal.close()


@pytest.mark.parametrize("state", [None, *(state for state in CheckpointState if state != "committed")])
def test_what_was_told_and_is_not_committed_is_lost(journal: Journal, state: CheckpointState | None) -> None:
    _commit(journal, "ck", 1)
    assert _findings(journal, {} if state is None else {"ck": Kept(state)}) == [Wrong.LOST]


def test_what_somebody_asked_to_be_deleted_may_be_gone_until_it_was_taken_back(journal: Journal) -> None:
    _commit(journal, "ck", 1)
    journal.asked("ck")
    assert _findings(journal, {}) == []
    journal.back("ck")
    assert _findings(journal, {}) == [Wrong.LOST]


def test_a_policy_takes_what_is_older_than_those_it_keeps_and_nothing_else(journal: Journal) -> None:
    for step in range(3):
        _commit(journal, f"ck{step}", step)
    newest, second = Kept(CheckpointState.COMMITTED), Kept(CheckpointState.COMMITTED)
    assert _findings(journal, {"ck1": second, "ck2": newest}, {"r": 2}) == []
    assert _findings(journal, {"ck0": second, "ck1": second}, {"r": 2}) == [Wrong.LOST]


def test_a_commit_of_a_launch_that_was_fenced_is_found(journal: Journal) -> None:
    _commit(journal, "ck", 1, after_fence=True)
    assert _findings(journal, {"ck": Kept(CheckpointState.COMMITTED)}) == [Wrong.MIXED]


def test_a_failover_excuses_only_what_was_not_recorded_and_what_was_said_first(journal: Journal) -> None:
    _commit(journal, "recorded", 1)
    _commit(journal, "unrecorded", 2)
    (at,) = (line["at"] for line in journal.lines("committed") if line["checkpoint"] == "unrecorded")
    journal.failed_over(at - 60, at + 60, ["recorded"])
    assert _findings(journal, {}) == [Wrong.LOST, Wrong.LOST]
    journal.write(kind="told", at=at + 61, what="it went backwards")
    assert _findings(journal, {}) == [Wrong.LOST]
    assert _findings(journal, {"recorded": Kept(CheckpointState.COMMITTED)}) == []


def test_a_launch_that_is_offered_an_older_step_without_a_word_has_lost_one(journal: Journal) -> None:
    _commit(journal, "ck", 9)
    (at,) = (line["at"] for line in journal.lines("committed"))
    kept = {"ck": Kept(CheckpointState.COMMITTED)}
    journal.opened("r", "next", 1, 2, at + 1, 9, [])
    journal.opened("r", "told why", 1, 3, at + 1, 3, ["ck"])
    assert _findings(journal, kept) == []
    journal.opened("r", "older", 1, 4, at + 1, 3, [])
    assert _findings(journal, kept) == [Wrong.LOST]


def test_bytes_say_whose_they_are() -> None:
    shards = {rank: Saved("r", "one", 2, 7, rank).chunks() for rank in range(2)}
    assert check_content("r", 2, 7, shards) == "one"
    with pytest.raises(WrongError):
        check_content("r", 2, 8, shards)
    with pytest.raises(WrongError):
        check_content("r", 2, 7, {0: shards[0], 1: [*shards[1][:-2], shards[0][-2], shards[1][-1]]})
    with pytest.raises(WrongError):
        check_content("r", 2, 7, {0: shards[0]})
    with pytest.raises(MixedError):
        check_content("r", 2, 7, {0: shards[0], 1: Saved("r", "other", 2, 7, 1).chunks()})
