"""What is held is taken away by nobody (rule holds-outrank): each path that takes something away, and races."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, select, update

import holdfast_service
import holdfast_service.collect.controller
import holdfast_service.collect.mark_and_delete
import holdfast_service.holds.holds
import holdfast_service.retention.purge
import holdfast_service.retention.trash
from holdfast_protocol.states import CheckpointState
from holdfast_service.db.tables.core import Checkpoint, Copy
from holdfast_service.db.tables.operations import Controller
from holdfast_service.settings import ServiceSettings
from tests.service.conftest import Clock
from tests.support.interleave import hold_after, in_background, overlap, refused
from tests.support.rank import Job, Refused, answer, digest_of
from tests.support.service import RunningService

pytestmark = pytest.mark.rule("holds-outrank")
SERVICE = Path(holdfast_service.__file__).parent

# Whatever moves a checkpoint or a copy towards its end, or removes an object: where, and what keeps the held ones.
TAKES_AWAY = {
    ("retention/trash.py", "CheckpointState.TRASHED"): "asks for holds under the checkpoint's lock",
    ("rebuild/finish.py", "CheckpointState.TRASHED"): "only of deleted runs, and one with a held checkpoint lives on",
    ("retention/purge.py", "CheckpointState.DELETING"): "asks for holds under the checkpoint's lock",
    ("retention/purge.py", "CheckpointState.DELETED"): "only after deleting, which cannot be held",
    (
        "collect/mark_and_delete.py",
        "CopyState.DELETING",
    ): "only of chunks that nothing committed, trashed or held needs",
    ("collect/mark_and_delete.py", "CopyState.GONE"): "only what was marked",
    ("collect/mark_and_delete.py", "store.delete"): "only what was marked",
    ("collect/orphans.py", "store.delete"): "only objects that no row of the catalog knows",
    ("tiers/cool.py", "CopyState.DELETING"): "only beside a colder copy, and never what the store was told to hold",
    ("records/writing.py", "store.delete_named"): "the record of a checkpoint that is deleting; an older version",
    ("records/history.py", "store.delete_named"): "what an earlier process remembered, and no data",
    ("attached_stores/samples.py", "store.delete"): "samples of holdfast doctor, which are no chunks",
}


def found_in_the_sources() -> set[tuple[str, str]]:
    found = set()
    for path in SERVICE.rglob("*.py"):
        name = path.relative_to(SERVICE).as_posix()
        if name.startswith("stores/"):  # the stores themselves, and the probe's own objects
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found |= {(name, what) for what in taken_away_by(node)}
    return found


def taken_away_by(node: ast.AST) -> list[str]:
    ends = {f"CheckpointState.{end}" for end in ("TRASHED", "DELETING", "DELETED")} | {
        "CopyState.DELETING",
        "CopyState.GONE",
    }
    if isinstance(node, ast.Assign) and any(ast.unparse(target).endswith(".state") for target in node.targets):
        return [text for text in (ast.unparse(node.value),) if text in ends]
    if isinstance(node, ast.keyword) and node.arg == "state":
        return [text for text in (ast.unparse(node.value),) if text in ends]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        receiver = ast.unparse(node.func.value)
        if node.func.attr in ("delete", "delete_named") and receiver.rpartition(".")[2].strip("_") == "store":
            return [f"store.{node.func.attr}"]
    return []


def test_every_path_that_takes_something_away_is_known_here() -> None:
    """A new one must say what keeps the held ones from it, and be tried below."""
    assert found_in_the_sources() == set(TAKES_AWAY)


def place(service: RunningService, checkpoint_id: str, **body: Any) -> dict[str, Any]:
    reply = service.http().post(f"/v1/checkpoints/{checkpoint_id}/holds", json={"reason": "evidence"} | body)
    return answer(reply)  # type: ignore[no-any-return]


def release(service: RunningService, hold: dict[str, Any]) -> None:
    other = service.http(token=service.token())
    answer(other.post(f"/v1/holds/{hold['id']}/release", json={"reason": "closed"}))


def prune(service: RunningService, *checkpoint_ids: str, **body: Any) -> Any:
    wanted = {"checkpoint_ids": list(checkpoint_ids), "reason": "not needed"} | body
    return answer(service.http().post("/v1/projects/demo/runs/gpt/retention/prune", json=wanted))


def state_of(service: RunningService, checkpoint_id: str) -> str:
    with service.context.database.read() as session:
        return str(session.scalar(select(Checkpoint.state).where(Checkpoint.id == checkpoint_id)))


def copy_states(service: RunningService, data: bytes) -> list[str]:
    with service.context.database.read() as session:
        return list(session.scalars(select(Copy.state).where(Copy.stored_digest == digest_of(data))))


def purge(service: RunningService) -> None:
    """One pass of many: no gap is behind it that would move the ends in the trash."""
    with service.context.database.transaction() as session:
        session.execute(delete(Controller).where(Controller.name == holdfast_service.retention.purge.NAME))
    holdfast_service.retention.purge.reconcile(service.context)


def collect(service: RunningService, clock: Clock) -> None:
    """After every ticket's end, whatever it is that may go."""
    clock.advance(service.context.settings.ticket_seconds + service.context.settings.longest_upload_seconds + 1)
    holdfast_service.collect.controller.reconcile(service.context)
    holdfast_service.collect.controller.reconcile(service.context)


@pytest.fixture
def settings(settings: ServiceSettings) -> ServiceSettings:
    """What is in the trash may be purged at once."""
    return settings.model_copy(update={"trash_person_seconds": 0.0})


@pytest.fixture
def saved(service: RunningService) -> dict[str, Any]:
    """A checkpoint that nothing but a hold could keep; two newer ones stay, whatever is wanted."""
    job = Job(service.http())
    views = [job.save(step, content=b"held" if step == 100 else None) for step in (100, 200, 300)]
    job.end()
    return views[0]


def test_nobody_takes_a_held_checkpoint_or_its_bytes_away_and_the_refusal_says_who_why_and_until(
    service: RunningService, saved: dict[str, Any], clock: Clock
) -> None:
    holds = [place(service, saved["id"]), place(service, saved["id"], retain_until="2126-01-31T00:00:00Z")]
    with refused("checkpoint_held") as refusal:
        prune(service, saved["id"])
    for said in ("test train read operate admin metrics", "evidence", "until 2126-01-31 00:00 UTC"):
        assert said in refusal.value.detail
    everything = prune(service, filter={}, all_of_run=True, checkpoint_ids=None)
    assert saved["id"] not in [one["checkpoint_id"] for one in everything["trashed"]]
    purge(service)
    collect(service, clock)
    assert state_of(service, saved["id"]) == "committed"
    assert copy_states(service, b"held") == ["verified"]
    release(service, holds[0])
    with refused("checkpoint_held"):
        prune(service, saved["id"])
    release(service, holds[1])
    assert [one["checkpoint_id"] for one in prune(service, saved["id"], all_of_run=True)["trashed"]] == [saved["id"]]
    purge(service)
    collect(service, clock)
    assert state_of(service, saved["id"]) == "deleted"
    assert copy_states(service, b"held") in ([], ["gone"])


def test_what_is_held_in_the_trash_stays_there_and_can_be_taken_back(
    service: RunningService, saved: dict[str, Any], clock: Clock
) -> None:
    prune(service, saved["id"])
    hold = place(service, saved["id"])
    purge(service)
    collect(service, clock)
    assert state_of(service, saved["id"]) == "trashed"
    assert copy_states(service, b"held") == ["verified"]
    answer(service.http().post(f"/v1/checkpoints/{saved['id']}/undelete", json={}))
    assert answer(service.http().get("/v1/holds"))["items"][0]["id"] == hold["id"]


def test_a_chunk_stays_for_the_held_one_of_the_checkpoints_that_share_it(
    service: RunningService, saved: dict[str, Any], clock: Clock
) -> None:
    """And whatever state some other part may have given the held one."""
    other = Job(service.http(), "demo/other").save(100, content=b"held")
    place(service, saved["id"])
    with service.context.database.transaction() as session:
        session.execute(
            update(Checkpoint)
            .where(Checkpoint.id.in_([saved["id"], other["id"]]))
            .values(state=CheckpointState.DELETED)
        )
    collect(service, clock)
    assert copy_states(service, b"held") == ["verified"]


def outcome_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Refused as error:
        return error.code
    return "done"


def test_a_hold_that_comes_first_keeps_the_checkpoint_from_the_trash(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_after(monkeypatch, holdfast_service.holds.holds, "locked_checkpoint")
    placing, pruning = overlap(
        service, gate, lambda: place(service, saved["id"]), lambda: outcome_of(lambda: prune(service, saved["id"]))
    )
    assert placing.result()["in_force"]
    pruning.result()
    assert state_of(service, saved["id"]) == "committed"


def test_a_hold_that_comes_second_finds_it_in_the_trash_and_keeps_it_there(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_after(monkeypatch, holdfast_service.retention.trash, "_free")
    pruning, placing = overlap(service, gate, lambda: prune(service, saved["id"]), lambda: place(service, saved["id"]))
    assert pruning.result()["trashed"]
    assert placing.result()["in_force"]
    purge(service)
    assert state_of(service, saved["id"]) == "trashed"


def test_a_hold_that_comes_first_keeps_the_checkpoint_from_the_purge(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The purge has seen no hold when it looked for work, and sees it under the lock."""
    prune(service, saved["id"])
    gate = hold_after(monkeypatch, holdfast_service.retention.purge, "_ids")
    with in_background(gate) as threads:
        purging = threads.submit(holdfast_service.retention.purge.reconcile, service.context)
        gate.wait_until_reached()
        assert place(service, saved["id"])["in_force"]
        gate.open()
        purging.result()
    assert state_of(service, saved["id"]) == "trashed"


def test_a_hold_that_comes_after_the_purge_has_begun_is_refused(
    service: RunningService, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told that something is held whose bytes are going."""
    prune(service, saved["id"])
    gate = hold_after(monkeypatch, holdfast_service.retention.purge, "_tell")
    purging, placing = overlap(
        service,
        gate,
        lambda: holdfast_service.retention.purge.reconcile(service.context),
        lambda: outcome_of(lambda: place(service, saved["id"])),
    )
    purging.result()
    assert placing.result() == "checkpoint_conflict"
    assert state_of(service, saved["id"]) == "deleted"


def test_a_hold_that_comes_while_the_collector_looks_keeps_every_chunk(
    service: RunningService, saved: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    prune(service, saved["id"])
    clock.advance(service.context.settings.ticket_seconds + service.context.settings.longest_upload_seconds + 1)
    gate = hold_after(monkeypatch, holdfast_service.collect.mark_and_delete, "_due_candidates")
    collecting, placing = overlap(
        service,
        gate,
        lambda: holdfast_service.collect.controller.reconcile(service.context),
        lambda: place(service, saved["id"]),
    )
    collecting.result()
    assert placing.result()["in_force"]
    purge(service)
    collect(service, clock)
    assert copy_states(service, b"held") == ["verified"]
