"""A job's own part: it exchanges its platform's token, renews in time, and goes on while the service is away."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from holdfast_client.errors import ConfigurationError, HoldfastError, IdentityTokenInvalid, ServiceUnavailable
from holdfast_client.identity import IdentityTokens
from holdfast_client.settings import ClientSettings
from holdfast_protocol.service import ExchangedToken, ExchangeToken
from tests.support.metadata_fakes.aws_sts import ROLE, FakeSts
from tests.support.scripted_http import Reply, as_json, in_turn, scripted
from tests.support.workload_issuer import ec_key, workload_issuer

HOUR = 3600


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Service:
    """What an exchange gives: the next number as a token, for an hour."""

    def __init__(self) -> None:
        self.asked: list[ExchangeToken] = []
        self.failure: HoldfastError | None = None
        self.before: Callable[[], None] = lambda: None

    def __call__(self, request: ExchangeToken) -> ExchangedToken:
        self.asked.append(request)
        self.before()
        if self.failure is not None:
            raise self.failure
        return ExchangedToken(
            id="id",
            name="name",
            project=None,
            scopes=[],
            created_at=datetime.now(UTC),
            expires_at=None,
            revoked_at=None,
            roles=[],
            access_token=f"hold_{len(self.asked)}",
            expires_in=HOUR,
            scope="",
        )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("a.b.c\n")
    return path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def tokens(file: Path, clock: Clock, service: Service) -> IdentityTokens:
    settings = ClientSettings(identity_token_file=file, identity_project="demo", identity_role="reader")
    return IdentityTokens(settings, service, clock=clock)


def test_one_exchange_does_for_many_calls_and_says_project_and_role(tokens: IdentityTokens, service: Service) -> None:
    assert [tokens.token() for _ in range(3)] == ["hold_1"] * 3
    (asked,) = service.asked
    assert (asked.subject_token, asked.project, asked.role) == ("a.b.c", "demo", "reader")
    assert "a.b.c" not in repr(asked)


def test_it_renews_before_the_end_with_what_the_file_says_then(
    tokens: IdentityTokens, clock: Clock, service: Service, file: Path
) -> None:
    for number in range(1, 200):  # a job of days
        assert tokens.token() == f"hold_{number}"
        clock.now += 0.49 * HOUR
        assert tokens.token() == f"hold_{number}", "not before half of its life"
        file.write_text(f"a.b.{number}")
        clock.now += 0.22 * HOUR
    assert [asked.subject_token for asked in service.asked[1:4]] == ["a.b.1", "a.b.2", "a.b.3"]


def test_while_none_is_to_be_had_it_goes_on_with_the_one_there_is_until_its_end(
    tokens: IdentityTokens, clock: Clock, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    assert tokens.token() == "hold_1"
    service.failure = ServiceUnavailable("The provider does not answer")
    clock.now += 0.8 * HOUR
    with caplog.at_level(logging.WARNING, "holdfast.client"):
        assert [tokens.token() for _ in range(5)] == ["hold_1"] * 5
    assert len(service.asked) == 2, "it waits before it asks again"
    assert "ends in 720 s and was not renewed" in caplog.text
    clock.now += 0.25 * HOUR
    with pytest.raises(ServiceUnavailable):
        tokens.token()
    service.failure = None
    assert tokens.token() == "hold_4"


def test_one_that_was_refused_is_not_used_again(tokens: IdentityTokens) -> None:
    assert tokens.token() == "hold_1"
    assert tokens.refused("hold_1")
    assert tokens.token() == "hold_2"
    assert tokens.refused("hold_1"), "another call came back late"
    assert tokens.token() == "hold_2"


def test_threads_without_a_token_wait_for_one_exchange(tokens: IdentityTokens, service: Service) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(60)

    service.before = wait
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(tokens.token())) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert found == ["hold_1"] * 8
    assert len(service.asked) == 1


def test_who_has_a_good_one_does_not_wait_for_another_threads_renewal(
    tokens: IdentityTokens, clock: Clock, service: Service
) -> None:
    tokens.token()
    clock.now += 0.8 * HOUR
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(60)

    service.before = wait
    thread = threading.Thread(target=tokens.token)
    thread.start()
    assert begun.wait(60)
    assert tokens.token() == "hold_1"
    go_on.set()
    thread.join(60)
    assert tokens.token() == "hold_2"


@pytest.mark.parametrize("content", [None, "", "no token", "a.b.c\nd.e.f", "hält"])
def test_a_file_without_a_token_is_told_and_not_shown(tokens: IdentityTokens, file: Path, content: str | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(ConfigurationError, match="HOLDFAST_IDENTITY_TOKEN_FILE") as caught:
        tokens.token()
    assert not content or content not in str(caught.value)


def test_a_token_that_is_set_comes_first(file: Path) -> None:
    assert not ClientSettings(token="hold_a_b", identity_token_file=file).has_identity
    assert ClientSettings(identity_token_file=file).has_identity
    assert not ClientSettings().has_identity


class TestGitHub:
    @pytest.fixture
    def settings(self) -> ClientSettings:
        return ClientSettings(identity_audience="https://holdfast.example.org/?a=b")

    def test_the_runner_is_asked_for_a_token_of_the_audience(
        self, settings: ClientSettings, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with scripted(in_turn(as_json({"count": 1, "value": "x.y.z"}))) as runner:
            monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", f"{runner.url}/token?api-version=2.0")
            monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "of-the-runner")
            assert IdentityTokens(settings, service).token() == "hold_1"
        (seen,) = runner.seen
        assert seen.query == {"api-version": "2.0", "audience": "https://holdfast.example.org/?a=b"}
        assert seen.headers["authorization"] == "Bearer of-the-runner"
        assert service.asked[0].subject_token == "x.y.z"

    def test_elsewhere_it_says_what_is_missing(self, settings: ClientSettings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("ACTIONS_ID_TOKEN_REQUEST_URL", raising=False)
        with pytest.raises(ConfigurationError, match="id-token: write"):
            IdentityTokens(settings, Service()).token()

    @pytest.mark.parametrize("reply", [Reply(500), Reply(200, b"no json"), as_json({"value": 1}), as_json([])])
    def test_a_runner_that_gives_none_is_told(
        self, settings: ClientSettings, reply: Reply, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with scripted(in_turn(reply)) as runner:
            monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", runner.url)
            monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "of-the-runner")
            with pytest.raises((ServiceUnavailable, ConfigurationError), match="GitHub Actions gave no"):
                IdentityTokens(settings, Service()).token()


class TestAws:
    @pytest.fixture
    def settings(self) -> ClientSettings:
        return ClientSettings(identity_audience="https://holdfast.example.org", identity_platform="aws")

    @pytest.fixture
    def sts(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeSts]:
        with workload_issuer() as issuer:
            issuer.keys["first"] = ec_key(ec.SECP384R1())
            sts = FakeSts(issuer)
            with scripted(sts.answer) as server:
                given = sts.environment(server.url) | {"AWS_EC2_METADATA_DISABLED": "true"}
                given |= {name: str(tmp_path / "none") for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")}
                for name, value in given.items():
                    monkeypatch.setenv(name, value)
                monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
                yield sts

    def test_sts_is_asked_for_a_token_of_the_audience_each_time(
        self, settings: ClientSettings, service: Service, clock: Clock, sts: FakeSts
    ) -> None:
        tokens = IdentityTokens(settings, service, clock=clock)
        assert tokens.token() == "hold_1"
        clock.now += 0.9 * HOUR
        assert tokens.token() == "hold_2"
        given = [jwt.decode(each.subject_token, options={"verify_signature": False}) for each in service.asked]
        assert [(each["aud"], each["sub"], each["jti"]) for each in given] == [
            ("https://holdfast.example.org", ROLE, "call-1"),
            ("https://holdfast.example.org", ROLE, "call-2"),
        ]

    @pytest.mark.parametrize(
        ("refusal", "error", "told"),
        [
            ((403, "AccessDenied"), ConfigurationError, "sts:GetWebIdentityToken"),
            ((403, "OutboundWebIdentityFederationDisabledException"), ConfigurationError, "enable-outbound-web"),
            ((400, "ValidationError"), ConfigurationError, "ValidationError"),
            ((403, "ExpiredToken"), ServiceUnavailable, "ExpiredToken"),
            ((400, "Throttling"), ServiceUnavailable, "Throttling"),
            ((503, "ServiceUnavailable"), ServiceUnavailable, "AWS STS gave no token"),
        ],
    )
    def test_what_sts_refuses_is_told_and_what_may_pass_is_tried_again(
        self, settings: ClientSettings, sts: FakeSts, refusal: tuple[int, str], error: type[HoldfastError], told: str
    ) -> None:
        sts.refusal = refusal
        with pytest.raises(error, match=told):
            IdentityTokens(settings, Service()).token()
        assert sts.calls == 1, "the transport retries, and not boto3 besides"

    def test_the_call_is_signed_with_the_keys_of_the_role(
        self, settings: ClientSettings, sts: FakeSts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of somebody else")
        with pytest.raises(ConfigurationError, match="SignatureDoesNotMatch"):
            IdentityTokens(settings, Service()).token()

    @pytest.mark.parametrize(("missing", "told"), [("AWS_REGION", "set AWS_REGION"), ("AWS_ACCESS_KEY_ID", "IAM role")])
    def test_what_is_missing_is_told(
        self, settings: ClientSettings, sts: FakeSts, missing: str, told: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(missing)
        with pytest.raises(ConfigurationError, match=told):
            IdentityTokens(settings, Service()).token()

    def test_without_boto3_it_says_what_to_install(
        self, settings: ClientSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "boto3.session", None)
        with pytest.raises(ConfigurationError, match="pip install boto3"):
            IdentityTokens(settings, Service()).token()

    def test_a_boto3_that_is_too_old_is_told(
        self, settings: ClientSettings, sts: FakeSts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("boto3.session.Session.client", lambda *_, **__: object())
        with pytest.raises(ConfigurationError, match="--upgrade boto3"):
            IdentityTokens(settings, Service()).token()


def test_a_refusal_that_does_not_pass_is_raised_as_it_is(tokens: IdentityTokens, service: Service) -> None:
    service.failure = IdentityTokenInvalid("The token of the identity is not taken")
    for _ in range(2):
        with pytest.raises(IdentityTokenInvalid):
            tokens.token()
