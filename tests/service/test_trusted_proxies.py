"""The caller's address is that of the connection, or what a trusted proxy says: no caller chooses it."""

from __future__ import annotations

import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from holdfast_protocol.states import Scope
from holdfast_service.auth.principal import BURST, FailedCalls
from holdfast_service.serve import PortInUseError, serve
from holdfast_service.settings import ServiceSettings, SettingsError
from holdfast_service.web.connections import TrustedProxies, caller_address, caller_scheme
from tests.support.processes import ServerProcess
from tests.support.serve import HOLDFAST, without_holdfast_settings
from tests.support.service import RunningService, running_service

pytestmark = pytest.mark.rule("limits-before-work")
PROXY, OTHER = "127.0.0.9", "127.0.0.1"
WRONG = {"Authorization": f"Bearer hold_{'a1' * 8}_{'0123456789abcdef' * 4}"}


@pytest.fixture
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningService]:
    proxies = getattr(request, "param", f"{PROXY}, 10.0.0.0/8")
    with running_service(ServiceSettings(data_dir=tmp_path, port=0, trusted_proxies=proxies)) as running:
        running.app.state.failed_calls = FailedCalls(clock=lambda: 0.0)  # no failure is forgotten meanwhile
        yield running


def caller(service: RunningService, source: str) -> httpx.Client:
    """Connects from this address."""
    return httpx.Client(base_url=service.url, timeout=60, transport=httpx.HTTPTransport(local_address=source))


def fail(http: httpx.Client, forwarded: str | None = None) -> httpx.Response:
    headers = WRONG if forwarded is None else {**WRONG, "X-Forwarded-For": forwarded}
    return http.get("/v1/service", headers=headers)


@pytest.mark.parametrize("service", [ServiceSettings().trusted_proxies], indirect=True)
def test_by_default_no_program_of_this_machine_is_believed(service: RunningService) -> None:
    with caller(service, OTHER) as http:
        seen = [fail(http, f"203.0.113.{number}").status_code for number in range(BURST + 1)]
        assert seen == [401] * BURST + [429]
        assert f"from {OTHER} " in fail(http, "203.0.113.99").json()["detail"]


def test_a_stranger_does_not_choose_its_address(service: RunningService) -> None:
    with caller(service, OTHER) as direct:
        seen = [fail(direct, f"203.0.113.{number}").status_code for number in range(BURST + 1)]
        assert seen[-1] == 429
    with caller(service, PROXY) as proxy:
        # What it sends itself stands to the left of what the proxy adds.
        seen = [fail(proxy, f"203.0.113.{number}, 198.51.100.7").status_code for number in range(BURST + 1)]
        assert seen == [401] * BURST + [429]
        assert "from 198.51.100.7 " in fail(proxy, "198.51.100.7").json()["detail"]


def test_users_behind_one_proxy_do_not_lock_each_other_out(service: RunningService) -> None:
    with caller(service, PROXY) as proxy:
        seen = [fail(proxy, "198.51.100.7").status_code for _ in range(BURST + 1)]
        assert seen[-1] == 429
        assert fail(proxy, "198.51.100.8").status_code == 401
        assert fail(proxy, "198.51.100.7, 10.2.3.4").status_code == 429, "10.2.3.4 is a proxy, too"
        good = {"Authorization": f"Bearer {service.token()}", "X-Forwarded-For": "198.51.100.8"}
        assert proxy.get("/v1/service", headers=good).status_code == 200


def test_the_log_has_the_address_that_counts(service: RunningService, caplog: pytest.LogCaptureFixture) -> None:
    def lines_after(count: int) -> list[str]:
        """A request's line is written when its reply is already on the way."""
        ends_at = time.monotonic() + 60
        while len(lines := [line for line in caplog.messages if "event='request'" in line]) < count:
            assert time.monotonic() < ends_at, "the request has no line"
            time.sleep(0.01)
        return lines

    with caplog.at_level("INFO"), caller(service, PROXY) as proxy, caller(service, OTHER) as direct:
        fail(proxy, "evil, 198.51.100.7")
        lines_after(1)
        fail(direct, "198.51.100.8")
        lines = lines_after(2)
    assert ["client='198.51.100.7'" in line for line in lines] == [True, False]
    assert f"client='{OTHER}'" in lines[1]


@pytest.mark.parametrize(("source", "status"), [(PROXY, 201), (OTHER, 403)])
def test_only_a_trusted_proxy_says_that_the_page_came_over_https(
    service: RunningService, source: str, status: int
) -> None:
    headers = {
        "Authorization": f"Bearer {service.token(Scope.READ)}",
        "X-Forwarded-For": "198.51.100.7",
        "X-Forwarded-Proto": "https",
        "Origin": service.url.replace("http:", "https:"),
    }
    with caller(service, source) as http:
        reply = http.post("/v1/sessions", headers=headers)
    assert reply.status_code == status
    assert ("__Host-" in reply.headers.get("Set-Cookie", "")) is (status == 201)


@pytest.mark.parametrize(
    ("hops", "address"),
    [
        ([], None),
        ([""], None),
        (["unknown"], None),
        (["198.51.100.7"], "198.51.100.7"),
        (["198.51.100.7:4711"], "198.51.100.7"),
        (["::ffff:198.51.100.7"], "198.51.100.7"),
        (["[2001:db8::7]:4711"], "2001:db8::7"),
        (["2001:0db8:0::7"], "2001:db8::7"),
        (["203.0.113.9", "198.51.100.7"], "198.51.100.7"),
        (["203.0.113.9", "198.51.100.7", "10.1.1.1", "127.0.0.9"], "198.51.100.7"),
        (["10.1.1.1", "127.0.0.9"], "10.1.1.1"),
        (["203.0.113.9", "unix:", "10.1.1.1"], "10.1.1.1"),
        (["203.0.113.9", "198.51.100.7\x00", "10.1.1.1"], "10.1.1.1"),
        (["203.0.113.9", "::ffff:10.1.1.1"], "203.0.113.9"),
    ],
)
def test_hops_are_read_from_the_right(hops: list[str], address: str | None) -> None:
    assert caller_address(hops, TrustedProxies.parse(f"{PROXY},10.0.0.0/8")) == address


@pytest.mark.parametrize(
    ("said", "scheme"),
    [([], None), (["https"], "https"), (["HTTPS"], "https"), (["https", "http"], "http"), (["https", "spdy"], None)],
)
def test_it_is_https_only_if_every_hop_says_so(said: list[str], scheme: str | None) -> None:
    assert caller_scheme(said) == scheme


@pytest.mark.parametrize("text", ["*", "0.0.0.0/0", "::/0", "proxy.example", "10.0.0.1/8", "127.0.0.1;10.0.0.1"])
def test_what_is_no_proxy_or_every_address_stops_the_start(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="HOLDFAST_TRUSTED_PROXIES"):
        TrustedProxies.of(ServiceSettings(trusted_proxies=text))


def test_behind_a_unix_socket_who_may_open_it_is_the_proxy(tmp_path: Path) -> None:
    path, token = tmp_path / "holdfast.sock", f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"
    settings = {
        "HOLDFAST_DATA_DIR": str(tmp_path / "data"),
        "HOLDFAST_SOCKET": str(path),
        "HOLDFAST_TRUSTED_PROXIES": "unix",
        "HOLDFAST_BOOTSTRAP_TOKEN": token,
    }

    def http() -> httpx.Client:
        return httpx.Client(base_url="http://holdfast", timeout=60, transport=httpx.HTTPTransport(uds=str(path)))

    def started(starts: int) -> ServerProcess:
        return ServerProcess(
            [HOLDFAST, "serve"],
            log=tmp_path / "log",
            ready=lambda: (tmp_path / "log").read_text().count(f" listens on http+unix:{path}") == starts,
            env=without_holdfast_settings() | settings,
        )

    process = started(1)
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with http() as client:
            assert any(fail(client, "198.51.100.7").status_code == 429 for _ in range(50 * BURST))
            assert fail(client, "198.51.100.8").status_code == 401
            good = client.get("/v1/service", headers={"Authorization": f"Bearer {token}"})
            assert good.status_code == 200, "a call without the header is good too: it has no address"
        with pytest.raises(PortInUseError, match="HOLDFAST_SOCKET"):
            serve(ServiceSettings(data_dir=tmp_path / "other", socket=path), lambda *_: None)
        assert path.is_socket()
        assert not (tmp_path / "other").exists()
        process.kill9()
        process = started(2)  # what the killed one left there is in nobody's way
        assert "198.51.100.7" in process.log_text
    finally:
        process.stop()
    assert not path.exists()
