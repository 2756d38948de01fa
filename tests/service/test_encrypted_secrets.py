"""What is secret in a catalog, with a key and without: a dump of the database does not hold it."""

from __future__ import annotations

import base64
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic import command
from pydantic import SecretStr
from sqlalchemy import select, update

from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import alembic_config, exclusive_connection
from holdfast_service.db.tables.core import CatalogIdentity
from holdfast_service.db.tables.webhooks import Webhook
from holdfast_service.rebuild.run import rebuild
from holdfast_service.secrets.kept import encrypt_anew
from holdfast_service.secrets.keyring import keyring_of
from holdfast_service.settings import ServiceSettings, SettingsError
from holdfast_service.stores.registry import open_store
from holdfast_service.webhooks.controller import reconcile
from tests.support.dumps import dump_of, is_found
from tests.support.rank import Job, answer
from tests.support.rebuilt import SIGNING_KEY, record_all
from tests.support.serve import run_holdfast
from tests.support.service import RunningService, running_service
from tests.support.signed_in import sign_in
from tests.support.webhooks import Receiver, deliveries, make_hook

OLD, NEW = (base64.b64encode(secrets.token_bytes(32)).decode() for _ in range(2))


def with_keys(settings: ServiceSettings, *keys: str) -> ServiceSettings:
    return settings.model_copy(update={"secrets_key": SecretStr("\n".join(keys)) if keys else None})


def start(settings: ServiceSettings) -> None:
    with running_service(settings):
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


@pytest.fixture
def calling(settings: ServiceSettings, receiver: Receiver) -> ServiceSettings:
    """May call the receiver."""
    return settings.model_copy(update={"webhook_allowed_hosts": receiver.url.removeprefix("http://")})


def secrets_made_in(service: RunningService) -> dict[str, bytes]:
    """One of each kind, by what it is."""
    service.make_project("demo")
    http = service.http()
    standard = make_hook(service, "https://hooks.example.org/in?key=s3cret-of-the-query", "attempt.failed")
    slack = {"url": "https://hooks.slack.com/services/T0/s3cret-of-the-path", "events": ["attempt.failed"]}
    answer(http.post("/v1/projects/demo/webhooks", json=slack | {"format": "slack"}))
    pagerduty = {"url": "https://events.pagerduty.com/v2/enqueue", "events": ["attempt.lost"], "format": "pagerduty"}
    routing_key = "r0utingkey0123456789"
    answer(http.post("/v1/projects/demo/webhooks", json=pagerduty | {"routing_key": routing_key}))
    token = service.token()
    session = sign_in(service, token)
    return {
        "signing key": service.context.signing_key,
        "webhook's secret": base64.b64decode(standard["secret"].removeprefix("whsec_")),
        "query of a webhook": b"s3cret-of-the-query",
        "path of a webhook": b"s3cret-of-the-path",
        "routing key": routing_key.encode(),
        "token": token.rpartition("_")[2].encode(),
        "session": session.cookie.rpartition("_")[2].encode(),
    }


def found_in(database: str, looked_for: dict[str, bytes]) -> set[str]:
    dump = dump_of(database)
    assert "catalog_identity" in dump
    return {what for what, secret in looked_for.items() if is_found(secret, dump)}


ENCRYPTED = {"signing key", "webhook's secret", "query of a webhook", "path of a webhook", "routing key"}


def test_a_dump_holds_no_secret(settings: ServiceSettings) -> None:
    with running_service(with_keys(settings, NEW)) as service:
        made = secrets_made_in(service)
        shown = answer(service.http().get("/v1/projects/demo/webhooks"))["items"]
        assert {hook["url"] for hook in shown} >= {"https://hooks.example.org/in?…", "https://hooks.slack.com/…"}
        assert not found_in(settings.database_url_text, made | {"the key itself": base64.b64decode(NEW)})


def test_a_plain_catalog_is_encrypted_at_the_first_start_with_a_key_and_goes_on(settings: ServiceSettings) -> None:
    with running_service(settings) as service:
        made = secrets_made_in(service)
    assert found_in(settings.database_url_text, made) == ENCRYPTED, "the test finds what is there"
    with running_service(with_keys(settings, NEW)) as service:
        assert service.context.signing_key == made["signing key"]
        assert len(answer(service.http().get("/v1/projects/demo/webhooks"))["items"]) == 3
    assert not found_in(settings.database_url_text, made)


def test_a_start_without_the_key_is_refused_and_says_what_to_do(settings: ServiceSettings) -> None:
    start(with_keys(settings, OLD))
    (lacking,) = keyring_of(with_keys(settings, OLD)).ids
    for keys in ((), (NEW,)):
        with pytest.raises(SettingsError, match=rf"HOLDFAST_SECRETS_KEY_FILE.* {lacking}: .*--lost-key"):
            start(with_keys(settings, *keys))
    start(with_keys(settings, NEW, OLD))


def test_secrets_are_encrypted_anew_while_services_run(
    calling: ServiceSettings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What signs goes on signing, before, meanwhile and afterwards."""
    url = calling.database_url_text
    with running_service(with_keys(calling, OLD, NEW)) as service:
        service.make_project("demo")
        hooks = [make_hook(service, f"{receiver.url}/{number}", "attempt.failed") for number in range(5)]
        done = run_holdfast("admin", "rotate-secrets", HOLDFAST_DATABASE_URL=url, HOLDFAST_SECRETS_KEY=f"{NEW}\n{OLD}")
        assert done.returncode == 0, done.stderr
        assert "6 rows were not before" in done.stdout
        job = Job(service.http())
        job.end("failed")
        assert reconcile(service.context).done == len(hooks)
        assert {view["last_status"] for hook in hooks for view in deliveries(service, hook)} == {204}
        signing_key = service.context.signing_key
    with running_service(with_keys(calling, NEW)) as service:
        assert service.context.signing_key == signing_key
    monkeypatch.setattr("holdfast_service.secrets.kept._AT_ONCE", 2)
    database = Database(url)
    try:
        both = keyring_of(with_keys(calling, OLD, NEW))
        assert encrypt_anew(database, both) == 6, "in batches, and back again"
        assert encrypt_anew(database, both) == 0
    finally:
        database.dispose()


@pytest.mark.races
def test_webhooks_come_and_go_while_secrets_are_encrypted_anew(settings: ServiceSettings) -> None:
    with running_service(with_keys(settings, OLD, NEW)) as service, ThreadPoolExecutor(2) as threads:
        service.make_project("demo")
        first = [make_hook(service, f"https://a.example.org/{number}", "attempt.failed") for number in range(10)]
        stop = threading.Event()

        def rotate_back_and_forth() -> None:
            keyrings = [keyring_of(with_keys(settings, *keys)) for keys in ((NEW, OLD), (OLD, NEW))]
            while not stop.is_set():
                for keyring in keyrings:
                    encrypt_anew(service.context.database, keyring)

        rotating = threads.submit(rotate_back_and_forth)
        for hook in first:
            answer(service.http().delete(f"/v1/webhooks/{hook['id']}"))
            make_hook(service, "https://b.example.org/new", "attempt.failed")
        stop.set()
        rotating.result()
        shown = answer(service.http().get("/v1/projects/demo/webhooks"))["items"]
        assert [hook["url"] for hook in shown] == ["https://b.example.org/new"] * 10
        with service.context.database.read() as session:
            gone = select(Webhook.secret).where(Webhook.deleted_at.is_not(None))
            assert set(session.scalars(gone)) == {b""}, "a secret that was taken away is not brought back"


def test_a_secret_that_was_put_into_another_row_signs_nothing(calling: ServiceSettings, receiver: Receiver) -> None:
    with running_service(with_keys(calling, NEW)) as service:
        service.make_project("demo")
        mine, other = (make_hook(service, receiver.url, "attempt.failed") for _ in range(2))
        with service.context.database.transaction() as session:
            stolen = session.scalar(select(Webhook.secret).where(Webhook.id == other["id"]))
            session.execute(update(Webhook).where(Webhook.id == mine["id"]).values(secret=stolen))
        Job(service.http()).end("failed")
        report = reconcile(service.context)
        assert (report.done, report.failed) == (1, 1)
        assert "does not open" in deliveries(service, mine)[0]["last_error"]


def test_a_lost_key_is_given_up_by_a_person(calling: ServiceSettings) -> None:
    url = calling.database_url_text
    with running_service(with_keys(calling, OLD)) as service:
        made = secrets_made_in(service)
    given = {"HOLDFAST_DATABASE_URL": url, "HOLDFAST_SECRETS_KEY": NEW}
    refused = run_holdfast("admin", "rotate-secrets", **given)
    assert refused.returncode == 2
    assert "--lost-key" in refused.stderr
    done = run_holdfast("admin", "rotate-secrets", "--lost-key", **given)
    assert done.returncode == 0, done.stderr
    assert "A new signing key was drawn" in done.stdout
    with running_service(with_keys(calling, NEW)) as service:
        assert service.context.signing_key != made["signing key"]
        assert answer(service.http().get("/v1/projects/demo/webhooks"))["items"] == []
        Job(service.http()).save(1)
    assert not found_in(url, made)


def test_rotating_needs_a_key(settings: ServiceSettings) -> None:
    start(settings)
    refused = run_holdfast("admin", "rotate-secrets", HOLDFAST_DATABASE_URL=settings.database_url_text)
    assert refused.returncode == 2
    assert "must give the new key" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_identity_that_was_changed_stops_the_start(settings: ServiceSettings) -> None:
    start(with_keys(settings, NEW))
    database = Database(settings.database_url_text)
    try:
        with database.transaction() as session:
            session.execute(update(CatalogIdentity).values(signing_key=secrets.token_bytes(60)))
    finally:
        database.dispose()
    with pytest.raises(SettingsError, match="does not open"):
        start(with_keys(settings, NEW))


def test_the_revision_before_is_not_taken_back_over_what_it_cannot_open(settings: ServiceSettings) -> None:
    start(with_keys(settings, NEW))
    database = Database(settings.database_url_text)
    try:
        with pytest.raises(RuntimeError, match="has encrypted secrets"), exclusive_connection(database) as connection:
            command.downgrade(alembic_config(connection), "0029")
    finally:
        database.dispose()
    start(with_keys(settings, NEW))


def test_the_signing_key_of_a_rebuilt_catalog_is_never_plain(settings: ServiceSettings, empty_url: str) -> None:
    keyed = with_keys(settings, NEW)
    with running_service(keyed) as service:
        Job(service.http(), create=True).save(1)
        record_all(service.context)
    database = Database(empty_url)
    try:
        rebuild(
            database, [(settings.store_url, open_store(settings.store_url, SIGNING_KEY))], keyring=keyring_of(keyed)
        )
        with database.read() as session:
            assert {session.scalar(select(CatalogIdentity.encrypted_with))} == keyring_of(keyed).ids
    finally:
        database.dispose()
