"""When a token was last used: written down by the process, some minutes late, and for nobody that was not let in."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import Scope
from holdfast_service.auth import credentials
from holdfast_service.auth.credentials import EVERY_SECONDS, TokensUsed
from holdfast_service.auth.principal import new_token_text, parse_token
from holdfast_service.errors import ProblemError
from holdfast_service.work.processes import Presence
from tests.support.rank import answer
from tests.support.service import RunningService
from tests.support.signed_in import sign_in


def make(service: RunningService) -> Any:
    return answer(service.http().post("/v1/tokens", json={"name": "nightly", "scopes": ["read"]}))


def last_used(service: RunningService, token: dict[str, Any]) -> str | None:
    (found,) = [each for each in answer(service.http().get("/v1/tokens"))["items"] if each["id"] == token["id"]]
    return found["last_used_at"]


def say(service: RunningService) -> None:
    presence = Presence(service.context, "serve")
    presence.enter()
    presence.leave()


def test_a_call_is_told_when_the_process_next_says_that_it_is_alive(service: RunningService) -> None:
    used, unused = make(service), make(service)
    assert service.http(token=used["token"]).get("/v1/projects").status_code == 200
    assert last_used(service, used) is None, "no call waits for it"
    say(service)
    assert last_used(service, used) is not None
    assert last_used(service, unused) is None


def test_a_session_uses_its_token(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "EVERY_SECONDS", 0.0)
    made = make(service)
    page = sign_in(service, made["token"])
    say(service)
    before = last_used(service, made)
    assert page.http().get("/v1/projects").status_code == 200
    say(service)
    after = last_used(service, made)
    assert before is not None
    assert after is not None
    assert before < after


def test_a_call_that_is_not_let_in_uses_nothing(service: RunningService) -> None:
    revoked = make(service)
    answer(service.http().delete(f"/v1/tokens/{revoked['id']}"))
    guessed = revoked["token"].rpartition("_")[0] + "_" + new_token_text().rpartition("_")[2]
    for token in (revoked["token"], guessed):
        assert service.http(token=token).get("/v1/projects").status_code == 401
    say(service)
    assert last_used(service, revoked) is None


def test_a_token_that_calls_all_the_time_is_written_down_now_and_then(service: RunningService) -> None:
    now = 0.0
    used = TokensUsed(lambda: now)
    token_id = parse_token(service.token(Scope.READ))[0]
    written = []
    for _ in range(4):
        used.add(token_id)
        written.append(used.write_down(service.context.database))
        now += EVERY_SECONDS / 2
    assert written == [1, 0, 1, 0]


def test_what_could_not_be_written_is_written_the_next_time(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = TokensUsed()
    used.add(parse_token(service.token(Scope.READ))[0])

    def fails(*_: object) -> None:
        raise ProblemError(ProblemCode.DATABASE_UNAVAILABLE, "away")

    with monkeypatch.context() as patched:
        patched.setattr(credentials, "_write_last_use", fails)
        with pytest.raises(ProblemError):
            used.write_down(service.context.database)
    assert used.write_down(service.context.database) == 1
