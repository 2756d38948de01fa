"""`holdfast login` and `logout` against a real provider and a real service: the device flow, and what is kept."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

import holdfast_client.device_flow
from holdfast_client import Client, ClientSettings, errors
from holdfast_client.cli.main import app
from holdfast_client.device_flow import DeviceFlow
from holdfast_protocol.service import SignInProvider
from holdfast_service.settings import ServiceSettings
from tests.support.oidc_provider import CLIENT_SECRET, CONFIDENTIAL_CLIENT, PUBLIC_CLIENT, OidcProvider, Options
from tests.support.oidc_provider import oidc_provider as provider_of
from tests.support.people import READERS, TWO_PROJECTS, identity_file
from tests.support.rank import answer
from tests.support.serve import HOLDFAST
from tests.support.service import RunningService, running_service


@pytest.fixture(scope="module")
def rules_file(tmp_path_factory: pytest.TempPathFactory, oidc: OidcProvider) -> Path:
    oidc.account("ada", "readers")
    oidc.account("bo", "both")
    oidc.account("nobody")
    return identity_file(tmp_path_factory.mktemp("rules") / "identity.yaml", oidc, READERS, TWO_PROJECTS)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, rules_file: Path) -> Iterator[RunningService]:
    settings = ServiceSettings(data_dir=tmp_path_factory.mktemp("service"), port=0, identity_file=rules_file)
    with running_service(settings) as running:
        running.make_project("demo")
        running.make_project("other")
        yield running


@pytest.fixture(autouse=True)
def here(service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This user's shell. A provider that says nothing of how often to ask is asked often."""
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_LOGIN_DIR", str(tmp_path / "logins"))
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(tmp_path / "no-data"))
    monkeypatch.setenv("BROWSER", "there-is-one")
    monkeypatch.setattr(holdfast_client.device_flow, "_USUAL_INTERVAL_SECONDS", 0.01)


@pytest.fixture
def person(oidc: OidcProvider, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Who sits before the browser that the command opens."""

    def sits_there(subject: str, *, cancel: bool = False) -> None:
        def visit(link: str) -> bool:
            with oidc.http() as http:
                oidc.visit(http, link, subject=subject, cancel=cancel)
            return True

        monkeypatch.setattr(webbrowser, "open", visit)

    return sits_there


def holdfast(*arguments: str, exit_code: int = 0) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == exit_code, done.output
    return done.output


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "logins").glob("*")) if (folder / "logins").exists() else []


# --- the commands


def test_a_person_signs_in_once_and_every_command_calls_with_that_token(
    person: Callable[..., None], tmp_path: Path, service: RunningService
) -> None:
    person("ada")
    said = holdfast("login")
    assert "corp: ada" in said
    assert "demo" in said
    (file,) = kept(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    token = json.loads(file.read_text())["token"]
    assert token not in said
    assert "corp: ada" in holdfast("whoami")
    holdfast("projects", "show", "demo")
    holdfast("projects", "show", "other", exit_code=4)
    with Client() as client:
        assert client.service.info().token_project == "demo"


def test_signing_out_revokes_the_token_and_removes_it(
    person: Callable[..., None], tmp_path: Path, service: RunningService
) -> None:
    person("ada")
    holdfast("login")
    (file,) = kept(tmp_path)
    token = json.loads(file.read_text())["token"]
    assert "is signed out" in holdfast("logout")
    assert kept(tmp_path) == []
    assert service.http(token=token).get("/v1/service").status_code == 401
    assert "Nobody has signed in" in holdfast("logout")
    assert "holdfast login" in holdfast("whoami", exit_code=4)


def test_a_new_sign_in_revokes_the_one_before(
    person: Callable[..., None], tmp_path: Path, service: RunningService
) -> None:
    person("ada")
    holdfast("login")
    (file,) = kept(tmp_path)
    before = json.loads(file.read_text())["token"]
    holdfast("login")
    assert [each.name for each in kept(tmp_path)] == [file.name]
    assert service.http(token=before).get("/v1/service").status_code == 401
    holdfast("whoami")


def test_a_sign_in_that_is_over_says_holdfast_login(
    person: Callable[..., None], tmp_path: Path, service: RunningService
) -> None:
    person("ada")
    holdfast("login")
    (file,) = kept(tmp_path)
    answer(service.http().delete(f"/v1/tokens/{json.loads(file.read_text())['token_id']}"))
    said = holdfast("runs", "list", "demo", exit_code=4)
    assert "The sign-in of corp: ada" in said
    assert "`holdfast login`" in said
    holdfast("login")
    holdfast("runs", "list", "demo")


def test_who_may_work_on_several_projects_names_one(person: Callable[..., None]) -> None:
    person("bo")
    assert "demo, other" in holdfast("login", exit_code=4)
    holdfast("login", "--project", "other", "--role", "reader")
    said = holdfast("whoami")
    assert re.search(r"project +other", said)
    assert re.search(r"scopes +read$", said, re.MULTILINE)


def test_no_grant_and_a_declined_sign_in_keep_nothing(person: Callable[..., None], tmp_path: Path) -> None:
    person("nobody")
    assert "no rule gives it anything" in holdfast("login", exit_code=4)
    person("ada", cancel=True)
    assert "declined at Corp" in holdfast("login", exit_code=4)
    assert kept(tmp_path) == []


def test_a_provider_is_named_if_there_are_several_and_told_if_there_is_none(
    rules_file: Path, tmp_path: Path, oidc: OidcProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = json.loads(rules_file.read_text())
    two["providers"].append({"name": "second", "issuer": "https://id.example.org", "client_id": "holdfast"})
    both = tmp_path / "both.yaml"
    both.write_text(json.dumps(two))
    for file, said, code in ((both, "corp, second", 2), (None, "knows no provider", 4)):
        settings = ServiceSettings(data_dir=tmp_path / f"service-{code}", port=0, identity_file=file)
        with running_service(settings) as service:
            monkeypatch.setenv("HOLDFAST_URL", service.url)
            assert said in holdfast("login", exit_code=code)
            assert "third" not in holdfast("login", exit_code=code)
            if file is not None:
                assert "no provider 'third'" in holdfast("login", "--provider", "third", exit_code=2)


def test_where_the_service_has_a_secret_commands_need_a_client_of_their_own(
    tmp_path: Path, oidc: OidcProvider, person: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text(CLIENT_SECRET)
    client = {"client_id": CONFIDENTIAL_CLIENT, "client_secret_file": str(tmp_path / "secret")}
    person("ada")
    for at, more, code in ((1, {}, 4), (2, {"device_client_id": PUBLIC_CLIENT}, 0)):
        rules = identity_file(tmp_path / f"rules-{at}.yaml", oidc, READERS, **client, **more)
        settings = ServiceSettings(data_dir=tmp_path / f"service-{at}", port=0, identity_file=rules)
        with running_service(settings) as service:
            service.make_project("demo")
            monkeypatch.setenv("HOLDFAST_URL", service.url)
            said = holdfast("login", exit_code=code)
            assert "device_client_id" in said or "corp: ada" in said


def test_holdfast_token_goes_first_and_is_told(
    person: Callable[..., None], service: RunningService, monkeypatch
) -> None:
    person("ada")
    monkeypatch.setenv("HOLDFAST_TOKEN", service.token())
    assert "HOLDFAST_TOKEN is set" in holdfast("login")
    assert "corp: ada" not in holdfast("whoami")


def test_a_token_that_others_can_read_is_not_used(
    person: Callable[..., None], tmp_path: Path, service: RunningService
) -> None:
    person("ada")
    holdfast("login")
    (file,) = kept(tmp_path)
    file.chmod(0o644)
    assert "others on this machine can read it" in holdfast("whoami", exit_code=2)
    token = json.loads(file.read_text())["token"]
    holdfast("logout")
    assert service.http(token=token).get("/v1/service").status_code == 401


def test_what_is_kept_for_one_service_goes_to_no_other(person: Callable[..., None], service: RunningService) -> None:
    person("ada")
    holdfast("login")
    assert ClientSettings().find_token() is not None
    elsewhere = ClientSettings(url=service.url.replace("127.0.0.1", "localhost"))
    assert elsewhere.find_token() is None


def test_a_real_process_shows_the_code_and_waits_for_the_person(
    oidc: OidcProvider, tmp_path: Path, service: RunningService
) -> None:
    """Here the provider is asked as seldom as the protocol says."""
    told = subprocess.Popen(
        [str(HOLDFAST), "login", "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    with told as command:
        assert command.stderr is not None
        line = command.stderr.readline()
        found = re.search(r"Open (\S+) in any browser.* the code (\S+)\.$", line)
        assert found is not None, line + command.stderr.read()
        with oidc.http() as http:
            oidc.visit(http, f"{found[1]}?user_code={found[2]}", subject="ada")
        output, errors_said = command.communicate(timeout=300)
    assert command.returncode == 0, errors_said
    assert "corp: ada" in output
    assert "corp: ada" in holdfast("whoami")


# --- asking as often as one may, by the flow alone


class Sleeps(list[float]):
    """The pauses, which take no time; `then` happens in the one with that number."""

    def __init__(self, then: dict[int, Callable[[], object]] | None = None) -> None:
        super().__init__()
        self._then = then or {}
        self.now = 0.0

    def __call__(self, seconds: float) -> None:
        self.append(seconds)
        self.now += seconds
        self._then.get(len(self), lambda: None)()

    def clock(self) -> float:
        return self.now


@pytest.fixture
def flow(oidc: OidcProvider) -> Iterator[DeviceFlow]:
    told = SignInProvider(
        name="corp", title="Corp", issuer=oidc.issuer, device_client_id=PUBLIC_CLIENT, scopes=["openid"]
    )
    with DeviceFlow(told, httpx.create_ssl_context()) as made:
        yield made


def test_a_provider_that_wants_to_be_asked_less_often_is(flow: DeviceFlow, oidc: OidcProvider, monkeypatch) -> None:
    monkeypatch.setattr(holdfast_client.device_flow, "_USUAL_INTERVAL_SECONDS", 5.0)
    code = flow.begin()

    def approve() -> None:
        with oidc.http() as http:
            oidc.visit(http, str(code.url_with_code), subject="ada")

    oidc.slow_down(2)
    sleeps = Sleeps({4: approve})
    assert flow.wait(code, sleep=sleeps, clock=sleeps.clock).get_secret_value().count(".") == 2
    assert list(sleeps) == [5.0, 10.0, 15.0, 15.0]


def test_a_code_that_nobody_enters_ends(flow: DeviceFlow) -> None:
    code = flow.begin()
    sleeps = Sleeps()
    with pytest.raises(errors.SignInFailed, match=r"Nobody signed in at Corp with the code .* in time"):
        flow.wait(code, sleep=lambda _: sleeps(100.0), clock=sleeps.clock)
    assert len(sleeps) == code.expires_in_seconds / 100


def test_a_provider_that_says_the_code_has_expired_is_believed() -> None:
    with provider_of(Options(device_code_seconds=1)) as short:
        told = SignInProvider(
            name="corp", title="Corp", issuer=short.issuer, device_client_id=PUBLIC_CLIENT, scopes=["openid"]
        )
        with DeviceFlow(told, httpx.create_ssl_context()) as flow:
            code = flow.begin()
            patient = Sleeps()
            whole = DeviceFlow.wait
            longer = type(code)(**{**vars(code), "expires_in_seconds": 1e9})
            with pytest.raises(errors.SignInFailed, match="Nobody signed in"):
                whole(flow, longer, sleep=patient, clock=patient.clock)


def test_a_provider_that_is_away_for_a_moment_is_asked_less_often_and_one_that_is_gone_is_told(tmp_path: Path) -> None:
    with provider_of() as own:
        told = SignInProvider(
            name="corp", title="Corp", issuer=own.issuer, device_client_id=PUBLIC_CLIENT, scopes=["openid"]
        )
        with DeviceFlow(told, httpx.create_ssl_context()) as flow:
            code = flow.begin()
            sleeps = Sleeps({1: own.stop, 3: own.start})
            # Its memory has ended with it: the code is not known any more.
            with pytest.raises(errors.SignInFailed, match="invalid_grant"):
                flow.wait(code, sleep=sleeps, clock=sleeps.clock)
            assert list(sleeps) == [0.01, 0.02, 0.04]
        own.stop()
        with (
            DeviceFlow(told, httpx.create_ssl_context()) as flow,
            pytest.raises(errors.ServiceUnavailable, match="Corp"),
        ):
            flow.begin()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"issuer": "http://id.example.org"}, "is not reached by https"),
        ({"device_client_id": "nobody-knows-it"}, "gives no device code: invalid_client"),
    ],
)
def test_what_a_command_does_not_believe(oidc: OidcProvider, change: dict[str, str], said: str) -> None:
    told = {"name": "corp", "title": "Corp", "issuer": oidc.issuer, "device_client_id": PUBLIC_CLIENT, "scopes": []}
    with (
        DeviceFlow(SignInProvider(**{**told, **change}), httpx.create_ssl_context()) as flow,
        pytest.raises(errors.SignInFailed, match=said),
    ):
        flow.begin()
