"""Holds by the calls of people: place, list, extend, release, and who may."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from holdfast_protocol.states import CheckpointState, Scope
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.db.tables.operations import AuditEvent
from tests.service.conftest import Clock
from tests.support.interleave import refused
from tests.support.rank import Job, Refused, answer
from tests.support.service import RunningService

pytestmark = pytest.mark.rule("holds-outrank")
DAY = 86400


def place(service: RunningService, checkpoint_id: str, *, token: str = "", **body: Any) -> dict[str, Any]:
    reply = service.http(token=token).post(f"/v1/checkpoints/{checkpoint_id}/holds", json={"reason": "audit"} | body)
    return answer(reply)  # type: ignore[no-any-return]


def release(service: RunningService, hold_id: str, *, token: str) -> dict[str, Any]:
    reply = service.http(token=token).post(f"/v1/holds/{hold_id}/release", json={"reason": "closed"})
    return answer(reply)  # type: ignore[no-any-return]


def in_days(days: float) -> str:
    return (datetime.now(UTC) + timedelta(days=days)).isoformat()


def version_of(service: RunningService, checkpoint_id: str) -> str:
    return str(answer(service.http().get(f"/v1/checkpoints/{checkpoint_id}"))["etag"])


def test_a_hold_is_placed_once_shown_and_released_by_another_token(service: RunningService) -> None:
    saved = Job(service.http()).save(100)
    before = version_of(service, saved["id"])
    first = place(service, saved["id"])
    assert place(service, saved["id"])["id"] == first["id"], "the reply was lost and the call came again"
    other = service.token(Scope.OPERATE)
    second = place(service, saved["id"], token=other, reason="a court's order")
    assert (first["kind"], first["in_force"], first["step"], first["run"]) == ("legal", True, 100, "gpt")
    assert version_of(service, saved["id"]) != before
    http = service.http()
    for path in (f"/v1/checkpoints/{saved['id']}/holds", "/v1/holds", "/v1/holds?project=demo&run=gpt"):
        assert [one["id"] for one in answer(http.get(path))["items"]] == [second["id"], first["id"]]
    with refused("forbidden"):
        answer(http.post(f"/v1/holds/{first['id']}/release", json={"reason": "mine"}))
    with refused("forbidden"):  # another person's token, but no administrator's
        release(service, first["id"], token=other)
    admin = service.token(Scope.ADMIN)
    gone = release(service, first["id"], token=admin)
    assert release(service, first["id"], token=admin)["released_at"] == gone["released_at"]
    assert [one["id"] for one in answer(http.get("/v1/holds"))["items"]] == [second["id"]]
    over = answer(http.get("/v1/holds", params={"over": True}))["items"]
    assert [(one["id"], one["in_force"], one["release_reason"]) for one in over] == [
        (second["id"], True, None),
        (first["id"], False, "closed"),
    ]
    with service.context.database.read() as session:
        events = session.execute(
            select(AuditEvent.action, AuditEvent.reason)
            .where(AuditEvent.checkpoint_id == saved["id"], AuditEvent.action.like("hold.%"))
            .order_by(AuditEvent.id)
        ).all()
    assert [tuple(event) for event in events] == [
        ("hold.place", "audit"),
        ("hold.place", "a court's order"),
        ("hold.release", "closed"),
    ]


def made_with(service: RunningService, token: str, name: str) -> str:
    """A new administrator's token, as a person makes it."""
    reply = service.http(token=token).post("/v1/tokens", json={"name": name, "scopes": ["admin", "operate"]})
    return str(answer(reply)["token"])


@pytest.mark.rule("database-clock")
@pytest.mark.parametrize("passes", [1, -3600])
def test_nobody_releases_his_own_hold_with_another_token(service: RunningService, clock: Clock, passes: float) -> None:
    saved = Job(service.http()).save(100)
    root = service.token(Scope.ADMIN, Scope.OPERATE)
    placer, colleague = made_with(service, root, "placer"), made_with(service, root, "colleague")
    clock.advance(passes)
    hold = place(service, saved["id"], token=placer)
    clock.advance(passes)
    second_me = made_with(service, placer, "second me")
    made_since = made_with(service, root, "made since")
    for token, why in (
        (placer, "has placed this hold"),
        (second_me, "was made by"),
        (made_with(service, second_me, "third me"), "was made by"),
        (root, "has made"),
        (made_since, "was made after"),
        (made_with(service, made_since, "and its child"), "was made after"),
    ):
        with pytest.raises(Refused, match=why) as caught:
            release(service, hold["id"], token=token)
        assert caught.value.code == "forbidden"
    assert release(service, hold["id"], token=made_with(service, colleague, "their child"))["released_at"]
    # Whoever has the database can always make one.
    hold = place(service, saved["id"], token=placer)
    assert release(service, hold["id"], token=service.token(Scope.ADMIN))["released_at"]


def test_a_retain_until_ends_by_the_databases_clock_and_is_only_made_longer(
    service: RunningService, clock: Clock
) -> None:
    saved = Job(service.http()).save(100)
    http = service.http()
    hold = place(service, saved["id"], retain_until=in_days(10))
    assert hold["kind"] == "retain_until"
    with refused("invalid_request"):
        answer(http.patch(f"/v1/holds/{hold['id']}", json={"retain_until": in_days(9)}))
    with refused("invalid_request"):
        place(service, saved["id"], retain_until=in_days(-1))
    longer = answer(http.patch(f"/v1/holds/{hold['id']}", json={"retain_until": in_days(20)}))
    assert longer["retain_until"] > hold["retain_until"]
    clock.advance(15 * DAY)
    assert answer(http.get("/v1/holds"))["items"][0]["in_force"]
    clock.advance(6 * DAY)
    assert answer(http.get("/v1/holds"))["items"] == []
    with refused("invalid_request"):  # what is over may be purged already: nothing can be made longer
        answer(http.patch(f"/v1/holds/{hold['id']}", json={"retain_until": in_days(40)}))
    endless = place(service, saved["id"])
    with refused("invalid_request"):
        answer(http.patch(f"/v1/holds/{endless['id']}", json={"retain_until": in_days(40)}))


def test_only_what_is_committed_or_in_the_trash_is_held(service: RunningService) -> None:
    job = Job(service.http())
    kept, other = job.save(100)["id"], job.save(200)["id"]
    uploading = job.begin(300).id

    def becomes(checkpoint_id: str, state: CheckpointState) -> None:
        with service.context.database.transaction() as session:
            session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(state=state))

    becomes(kept, CheckpointState.TRASHED)
    assert place(service, kept)["in_force"]
    with refused("checkpoint_conflict") as refusal:
        place(service, uploading)
    assert "still uploading" in str(refusal.value)
    for state, said in (("aborted", "was aborted"), ("deleting", "is deleted"), ("deleted", "is deleted")):
        becomes(other, CheckpointState(state))
        with refused("checkpoint_conflict") as refusal:
            place(service, other)
        assert said in str(refusal.value)


def test_a_projects_token_neither_sees_nor_touches_the_holds_of_another(service: RunningService) -> None:
    saved = Job(service.http()).save(100)
    hold = place(service, saved["id"])
    service.make_project("other")
    stranger = service.token(project="other")
    http = service.http(token=stranger)
    assert answer(http.get("/v1/holds"))["items"] == []
    for code, call in {
        "checkpoint_not_found": lambda: place(service, saved["id"], token=stranger),
        "hold_not_found": lambda: release(service, hold["id"], token=stranger),
        "forbidden": lambda: answer(http.get("/v1/holds", params={"project": "demo"})),
    }.items():
        with refused(code):
            call()


def test_a_mirror_is_refused_where_no_store_has_object_lock(service: RunningService) -> None:
    saved = Job(service.http()).save(100)
    with refused("invalid_request"):
        place(service, saved["id"], mirror=True)
    assert answer(service.http().get("/v1/holds"))["items"] == []
