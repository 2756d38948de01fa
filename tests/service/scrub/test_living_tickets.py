"""A ticket that still lives, on stores that neither enforce a checksum nor If-None-Match (rule no-ticket-reuse)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from holdfast_service.copies.predicates import object_key
from holdfast_service.db.tables.core import Copy
from holdfast_service.scrub import read_copies, repair
from holdfast_service.scrub import verify as prove
from holdfast_service.scrub.read_copies import Tally
from holdfast_service.settings import ServiceSettings
from tests.service.conftest import Clock
from tests.support.rank import Job, Save, answer, digest_of
from tests.support.s3_fake.server import S3Fake, s3_fake
from tests.support.service import RunningService, running_service

DATA, POISON = b"weights", b"weightz"


@pytest.fixture
def versioned() -> bool:
    return False


@pytest.fixture
def lenient(versioned: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Fake]:
    with s3_fake(lenient=True, versioned=versioned) as fake:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        yield fake


@pytest.fixture
def service(lenient: S3Fake, settings: ServiceSettings) -> Iterator[RunningService]:
    with running_service(settings.model_copy(update={"store": lenient.store_url_for("checkpoints")})) as running:
        yield running


def uploaded(service: RunningService) -> tuple[Save, Callable[[bytes], None]]:
    """A save with DATA in it, committed; and how to use its ticket once more."""
    save = Job(service.http()).begin(1)
    reply = save.negotiate(0, [DATA, b"index"])
    save.send([DATA, b"index"], reply["chunks"])
    save.seal(0, [DATA, b"index"])
    assert save.now()["state"] == "committed"
    ticket = reply["chunks"][0]["ticket"]

    def replay(data: bytes) -> None:
        assert save.put(data, ticket).status_code == 200

    return save, replay


def copies(service: RunningService) -> list[Copy]:
    with service.context.database.read() as session:
        return list(session.scalars(select(Copy).where(Copy.stored_digest == digest_of(DATA)).order_by(Copy.id)))


def proofs(service: RunningService) -> list[str | None]:
    return [copy.proof for copy in copies(service)]


def other_run_is_told(service: RunningService, name: str) -> str:
    (told,) = Job(service.http(), f"demo/{name}").begin(1).negotiate(0, [DATA])["chunks"]
    return str(told["status"])


def read_by_ticket(service: RunningService, save: Save) -> bytes:
    reads: Any = answer(service.http().post(f"/v1/checkpoints/{save.id}/reads", json={"digests": [digest_of(DATA)]}))
    (ticket,) = reads["chunks"]
    return httpx.get(ticket["url"], headers=ticket["headers"]).raise_for_status().content


@pytest.mark.rule("no-ticket-reuse")
def test_nobody_relies_on_what_a_ticket_can_still_overwrite(service: RunningService, clock: Clock) -> None:
    save, replay = uploaded(service)
    assert prove.reconcile(service.context).good == 2
    assert proofs(service) == ["read_early"]
    assert other_run_is_told(service, "one") == "upload"
    replay(POISON)
    assert prove.reconcile(service.context).done == 0, "it is read again when it can say something, and not before"
    clock.let_tickets_expire(service.context.settings)
    assert prove.reconcile(service.context).bad == 1
    assert save.now()["health"] == "corrupt"
    assert other_run_is_told(service, "two") == "upload"


@pytest.mark.rule("no-ticket-reuse")
def test_what_is_read_behind_the_last_ticket_is_good_for_everybody(service: RunningService, clock: Clock) -> None:
    uploaded(service)
    prove.reconcile(service.context)
    clock.let_tickets_expire(service.context.settings)
    assert other_run_is_told(service, "one") == "upload"
    assert prove.reconcile(service.context).good == 2
    assert proofs(service)[0] == "read"
    assert other_run_is_told(service, "two") == "present"
    with service.context.database.read() as session:
        assert prove.backlog(session, service.context).due == 0


@pytest.mark.rule("no-ticket-reuse")
def test_a_fresh_ticket_of_a_pending_copy_counts_as_well(service: RunningService, clock: Clock) -> None:
    save = Job(service.http()).begin(1)
    save.negotiate(0, [DATA])
    settings = service.context.settings
    clock.advance(settings.ticket_seconds - 60)
    save.send([DATA], save.negotiate(0, [DATA])["chunks"])
    save.negotiate(0, finished=[DATA])
    clock.advance(settings.longest_upload_seconds + 70)  # behind the first ticket's time, within the second's
    prove.reconcile(service.context)
    assert proofs(service) == ["read_early"]


@pytest.mark.rule("no-ticket-reuse")
def test_what_repairs_and_can_still_be_overwritten_is_read_once_and_copied(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, replay = uploaded(service)
    replay(POISON)
    clock.let_tickets_expire(service.context.settings)
    assert prove.reconcile(service.context).bad == 1
    assert save.now()["health"] == "corrupt"
    save.job.save(2, content=DATA)
    readings = 0

    def read_one(*given: Any) -> Tally:
        nonlocal readings
        readings += 1
        assert readings == 1, "another reading says nothing before the ticket is over"
        return read_copies.read_one(*given)

    monkeypatch.setattr(repair, "read_one", read_one)
    report = repair.reconcile(service.context)
    assert (report.repaired_copies, report.repaired_checkpoints, report.failed) == (1, (save.id,), 0)
    assert proofs(service)[1:] == ["read_early", "read"]


@pytest.mark.rule("no-ticket-reuse")
@pytest.mark.parametrize("versioned", [True])
def test_where_the_store_has_versions_the_one_that_was_read_is_what_everybody_reads(
    service: RunningService, clock: Clock, lenient: S3Fake
) -> None:
    save, replay = uploaded(service)
    assert prove.reconcile(service.context).good == 2
    assert proofs(service) == ["read"]
    replay(POISON)
    assert other_run_is_told(service, "one") == "present"
    assert read_by_ticket(service, save) == DATA
    (copy,) = copies(service)
    key = object_key(copy.project_id, digest_of(DATA), copy)
    assert b"".join(service.context.store.open_read(key)) == DATA
    assert service.context.store.head(key).version_id == copy.version_id
    service.context.store.delete(key)
    assert not lenient.objects.versions("checkpoints/" + key.path)


@pytest.mark.rule("no-ticket-reuse")
def test_where_the_store_holds_tickets_to_their_bytes_one_reading_is_enough(
    settings: ServiceSettings, s3_service: RunningService
) -> None:
    capabilities = s3_service.context.store.capabilities
    assert capabilities is not None
    assert capabilities.binds_tickets
    uploaded(s3_service)
    assert [(copy.proof, copy.overwritable_until) for copy in copies(s3_service)] == [("store_sha256", None)]
