"""A token is replaced by one like it: both are good for a while, and then the first one ends."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from holdfast_protocol.states import Scope
from tests.service.conftest import Clock
from tests.support.rank import answer
from tests.support.service import RunningService
from tests.support.signed_in import sign_in

HOUR = 3600
ROTATE = {"overlap_seconds": HOUR, "expires_in_seconds": 90 * 24 * HOUR}


def make(service: RunningService, **more: Any) -> Any:
    return answer(service.http().post("/v1/tokens", json={"name": "trainer", "scopes": ["train", "read"], **more}))


def rotate(
    service: RunningService, token: dict[str, Any], http: httpx.Client | None = None, **changes: Any
) -> httpx.Response:
    return (http or service.http()).post(f"/v1/tokens/{token['id']}/rotate", json=ROTATE | changes)


def status_of(service: RunningService, made: dict[str, Any]) -> int:
    return service.http(token=made["token"]).get("/v1/service").status_code


def view_of(service: RunningService, token: dict[str, Any]) -> Any:
    (found,) = [each for each in answer(service.http().get("/v1/tokens"))["items"] if each["id"] == token["id"]]
    return found


def test_both_are_good_until_the_overlap_is_over(service: RunningService, clock: Clock) -> None:
    service.make_project("demo")
    old = make(service, project="demo", requests_per_second=5, concurrent_requests=8, expires_in_seconds=None)
    page = sign_in(service, old["token"])
    reply = rotate(service, old)
    assert reply.status_code == 201
    new = reply.json()
    like = ("name", "project", "scopes", "requests_per_second", "concurrent_requests")
    assert {name: new[name] for name in like} == {name: old[name] for name in like}
    assert new["id"] != old["id"]
    assert new["replaced"] == view_of(service, old)
    assert [status_of(service, each) for each in (old, new)] == [200, 200]
    clock.advance(HOUR + 1)
    assert [status_of(service, each) for each in (old, new)] == [401, 200]
    assert page.http().get("/v1/projects").status_code == 401, "its sessions end with it"
    clock.advance(90 * 24 * HOUR)
    assert status_of(service, new) == 401


def test_one_that_ends_earlier_is_not_prolonged(service: RunningService) -> None:
    old = make(service, expires_in_seconds=HOUR // 2)
    assert answer(rotate(service, old))["replaced"]["expires_at"] == old["expires_at"]


def test_a_token_without_admin_does_not_replace_itself(service: RunningService) -> None:
    stolen = make(service)
    reply = rotate(service, stolen, service.http(token=stolen["token"]))
    assert (reply.status_code, reply.json()["code"]) == (403, "forbidden")
    assert view_of(service, stolen)["expires_at"] == stolen["expires_at"]


def test_it_can_be_replaced_again_while_it_is_good(service: RunningService) -> None:
    """As the client does it if a reply was lost, and the new token's text with it."""
    old = make(service)
    lost = answer(rotate(service, old))
    answer(service.http().delete(f"/v1/tokens/{lost['id']}"))
    assert status_of(service, answer(rotate(service, old))) == 200


@pytest.mark.parametrize("over", ["revoked", "expired"])
def test_one_that_is_over_is_not_replaced(service: RunningService, clock: Clock, over: str) -> None:
    old = make(service, expires_in_seconds=HOUR)
    if over == "revoked":
        answer(service.http().delete(f"/v1/tokens/{old['id']}"))
    else:
        clock.advance(HOUR + 1)
    reply = rotate(service, old)
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")


def test_nobody_gets_more_by_it_than_he_has(service: RunningService) -> None:
    service.make_project("demo")
    service.make_project("other")
    wide = make(service, project="demo", scopes=["read", "operate"])
    admin = service.http(token=service.token(Scope.ADMIN, Scope.READ, project="demo"))
    reply = rotate(service, wide, admin)
    assert (reply.status_code, reply.json()["code"]) == (403, "forbidden")
    for foreign in (make(service, project="other"), make(service)):
        reply = rotate(service, foreign, admin)
        assert (reply.status_code, reply.json()["code"]) == (404, "token_not_found")
    assert view_of(service, wide)["expires_at"] == wide["expires_at"], "what was refused changes nothing"
    slow = make(service, scopes=["admin", "read"], requests_per_second=50)
    limited = service.http(token=slow["token"])
    fast = make(service, scopes=["read"], requests_per_second=100)
    assert rotate(service, fast, limited).status_code == 403
    unlimited = make(service, scopes=["read"])
    assert answer(rotate(service, unlimited, limited))["requests_per_second"] == 50


def test_the_same_call_twice_makes_one(service: RunningService) -> None:
    old, key = make(service), {"Idempotency-Key": "once"}
    http = service.http(headers=key.items())
    first = answer(rotate(service, old, http))
    again = rotate(service, old, http)
    assert (again.status_code, again.json()["code"]) == (409, "already_made")
    assert again.json()["context"]["id"] == first["id"]
    assert first["token"] not in again.text


def test_both_are_in_the_audit_log_without_their_text(service: RunningService) -> None:
    old = make(service)
    new = answer(rotate(service, old))
    reply = service.http().get("/v1/audit-events", params={"action": "token.", "limit": 2})
    rotated, created = answer(reply)["items"]
    assert (rotated["action"], created["action"]) == ("token.rotate", "token.create")
    assert (rotated["before"]["token"], rotated["after"]["replaced_by"]) == (old["id"], new["id"])
    assert rotated["before"]["expires_at"] > rotated["after"]["expires_at"]
    assert (created["after"]["token"], created["after"]["replaces"]) == (new["id"], old["id"])
    assert not any(made["token"].rpartition("_")[2] in reply.text for made in (old, new))


@pytest.mark.parametrize(
    ("lives", "quiet", "soon"), [(90 * 24 * HOUR, 82 * 24 * HOUR, 83 * 24 * HOUR + 1), (10 * HOUR, 8 * HOUR, 9 * HOUR)]
)
def test_a_caller_is_told_that_its_token_ends_soon(
    service: RunningService, clock: Clock, lives: int, quiet: int, soon: int
) -> None:
    made = make(service, expires_in_seconds=lives)
    http = service.http(token=made["token"])
    told = answer(http.get("/v1/service"))
    assert (told["token_id"], told["token_expires_at"], told["token_ends_soon"]) == (
        made["id"],
        made["expires_at"],
        False,
    )
    clock.advance(quiet)
    assert answer(http.get("/v1/service"))["token_ends_soon"] is False
    clock.advance(soon - quiet)
    assert answer(http.get("/v1/service"))["token_ends_soon"] is True
    for_ever = answer(service.http(token=service.token()).get("/v1/service"))
    assert (for_ever["token_expires_at"], for_ever["token_ends_soon"]) == (None, False)
