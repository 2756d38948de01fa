"""The client of a job that has nothing but its platform's token, against a service and an issuer that are real."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from holdfast_client import Client, ClientSettings
from holdfast_client.errors import (
    IdentityProjectNeeded,
    IdentityProviderUnavailable,
    IdentityTokenExpired,
    ServiceUnavailable,
)
from holdfast_service.settings import ServiceSettings
from tests.support.metadata_fakes.aws_sts import ROLE, FakeSts
from tests.support.rank import answer
from tests.support.scripted_http import scripted
from tests.support.service import RunningService, running_service
from tests.support.workload_issuer import WorkloadIssuer, ec_key, workload_issuer


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """What is asked here is the client: one database is enough."""
    return str(request.getfixturevalue("sqlite_catalogs").new(tmp_path))


@pytest.fixture
def issuer() -> Iterator[WorkloadIssuer]:
    with workload_issuer() as running:
        yield running


@pytest.fixture
def service(settings: ServiceSettings, issuer: WorkloadIssuer, tmp_path: Path) -> Iterator[RunningService]:
    provider = {"name": "cluster", "issuer": issuer.url, "audiences": ["holdfast"]}
    rule = {"name": "jobs", "provider": "cluster", "claims": {"sub": "system:serviceaccount:team-a:*"}}
    rule |= {"role": "trainer", "projects": ["demo", "other"]}
    of_aws = {"name": "jobs on AWS", "provider": "cluster", "claims": {"sub": ROLE}, "role": "trainer"}
    of_aws |= {"projects": ["demo"]}
    path = tmp_path / "identity.yaml"
    path.write_text(json.dumps({"providers": [provider], "rules": [rule, of_aws]}))
    with running_service(settings.model_copy(update={"identity_file": path})) as running:
        running.make_project("demo")
        yield running


@pytest.fixture
def token_file(tmp_path: Path, issuer: WorkloadIssuer) -> Path:
    path = tmp_path / "projected" / "token"
    path.parent.mkdir()
    rotate(path, issuer.signed())
    return path


def rotate(path: Path, token: str) -> None:
    """As a kubelet does it: the name leads to another file at once."""
    fresh = path.with_name("fresh")
    fresh.write_text(token)
    os.replace(fresh, path)


def client_of(service: RunningService, token_file: Path, **more: Any) -> Client:
    given = {"identity_project": "demo", "retry_seconds": 0} | more
    return Client(ClientSettings(url=service.url, identity_token_file=token_file, **given))


def exchanged(service: RunningService) -> list[dict[str, Any]]:
    return [each for each in answer(service.http().get("/v1/tokens"))["items"] if each["issuer"]]


def test_a_pod_that_mounts_nothing_but_a_token_calls(service: RunningService, token_file: Path) -> None:
    with client_of(service, token_file) as client:
        info = client.service.info()
        assert (info.token_project, sorted(info.token_scopes)) == ("demo", ["read", "train"])
        assert list(client.runs.all("demo")) == []
        with_other_deadline = client.with_retry_deadline(1.0, threading.Event())
        assert with_other_deadline.service.info().token_id == info.token_id, "copies share the token"
    assert len(exchanged(service)) == 1
    with client_of(service, token_file, identity_project=None) as client, pytest.raises(IdentityProjectNeeded):
        client.service.info()


def test_a_machine_at_aws_that_has_nothing_but_its_role_calls(
    service: RunningService, issuer: WorkloadIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer.keys["first"] = ec_key(ec.SECP384R1())
    sts = FakeSts(issuer)
    with scripted(sts.answer) as server:
        for name, value in sts.environment(server.url).items():
            monkeypatch.setenv(name, value)
        settings = ClientSettings(url=service.url, identity_audience="holdfast", identity_platform="aws")
        with Client(settings) as client:
            info = client.service.info()
            assert (info.token_project, info.token_name) == ("demo", f"cluster: {ROLE}")
            answer(service.http().delete(f"/v1/tokens/{info.token_id}"))
            assert client.service.info().token_id != info.token_id
    assert (sts.calls, len(exchanged(service))) == (2, 2)


def test_it_goes_on_after_its_token_was_revoked_and_its_file_rotated(
    service: RunningService, issuer: WorkloadIssuer, token_file: Path
) -> None:
    with client_of(service, token_file) as client:
        before = client.service.info().token_id
        rotate(token_file, issuer.signed(sub="system:serviceaccount:team-a:renamed"))
        answer(service.http().delete(f"/v1/tokens/{before}"))
        assert client.service.info().token_name == "cluster: system:serviceaccount:team-a:renamed"
        answer(service.http().delete(f"/v1/tokens/{client.service.info().token_id}"))
        assert client.events.position(), "who follows events goes on likewise"
    assert len(exchanged(service)) == 3


def test_while_the_provider_is_away_a_job_with_a_token_goes_on_and_a_new_one_is_told_to_retry(
    service: RunningService, issuer: WorkloadIssuer, token_file: Path
) -> None:
    issuer.status = 500
    with client_of(service, token_file) as newcomer, pytest.raises(IdentityProviderUnavailable):
        newcomer.service.info()
    identities = service.context.identities
    assert identities is not None
    identities._keys.clear()
    issuer.status = 200
    with client_of(service, token_file) as client:
        client.service.info()
        identities._keys.clear()
        issuer.status = 500
        assert list(client.runs.all("demo")) == []


def test_a_retry_deadline_holds_for_the_exchange_too(
    service: RunningService, issuer: WorkloadIssuer, token_file: Path
) -> None:
    issuer.status = 500
    with client_of(service, token_file, retry_seconds=60) as client:

        def repaired(_: object) -> None:
            identities = service.context.identities
            assert identities is not None
            identities._keys.clear()
            issuer.status = 200

        client.transport.on_retry = repaired
        assert client.service.info().token_project == "demo"


def test_a_token_that_is_not_taken_is_told_as_the_service_says_it(
    service: RunningService, issuer: WorkloadIssuer, token_file: Path
) -> None:
    rotate(token_file, issuer.signed(exp=issuer.claims()["iat"] - 3600))
    with client_of(service, token_file) as client, pytest.raises(IdentityTokenExpired, match="Get a fresh one"):
        client.service.info()


def test_a_platform_that_gives_no_fresh_token_makes_a_job_wait_and_does_not_end_it(
    service: RunningService, issuer: WorkloadIssuer, token_file: Path
) -> None:
    with client_of(service, token_file) as client:
        mine = client.service.info().token_id
        rotate(token_file, issuer.signed(exp=issuer.claims()["iat"] - 3600))
        answer(service.http().delete(f"/v1/tokens/{mine}"))
        with pytest.raises(ServiceUnavailable, match="Get a fresh one"):
            client.service.info()
        token_file.unlink()
        with pytest.raises(ServiceUnavailable, match="cannot be read"):
            client.service.info()
        rotate(token_file, issuer.signed())
        assert client.service.info().token_project == "demo"
