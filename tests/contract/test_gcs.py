"""gcs on the strict fake."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from google.cloud.storage import _signing

from holdfast_service.stores.base import (
    ObjectFacts,
    ObjectMismatch,
    ObjectMissing,
    StoreRefused,
    StoreUnavailable,
)
from holdfast_service.stores.bucket.presigned_probe import base64_md5
from holdfast_service.stores.gcs import calls
from holdfast_service.stores.gcs.gcs_store import GcsStore
from holdfast_service.stores.registry import open_store
from tests.contract.backends import Backend
from tests.contract.suite import StoreContract, TicketContract
from tests.support.stores import chunk_key, fetch, put_ticket, send


class _PastStore(GcsStore):
    """Google's signer takes no clock, so its own is turned back while it signs."""

    def presign(self, *arguments, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_signing, "_NOW", lambda zone: datetime.now(zone) - timedelta(hours=2))
            return super().presign(*arguments, **options)


@pytest.fixture(scope="module")
def backend(gcs):
    url = gcs.store_url_for(secrets.token_hex(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(gcs.key_file))
        store = open_store(url, b"k" * 32)

        @contextmanager
        def outage():
            gcs.stop()
            yield
            gcs.start()

        def hand_in(key, data):
            assert send("", put_ticket(store, key, data), data).status in {200, 412}

        store.probe()
        yield Backend(
            store,
            hand_in,
            proves=False,
            reopen=lambda: open_store(url, b"k" * 32),
            outage=outage,
            enforces="md5",
            past_store=_PastStore(store.location, store.calls, store.signer),
        )
        store.close()


class TestStore(StoreContract):
    pass


class TestTickets(TicketContract):
    pass


def _opened(monkeypatch, gcs, *, key_file=None, bucket="holdfast", more="") -> GcsStore:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key_file or gcs.key_file))
    return open_store(gcs.store_url_for(secrets.token_hex(4), bucket=bucket) + more, b"k" * 32)


def test_a_missing_bucket_is_not_taken_for_missing_objects(gcs, monkeypatch):
    store = _opened(monkeypatch, gcs, bucket="no-such-bucket")
    key = chunk_key(b"x")
    for call in (
        store.ping,
        store.probe,
        lambda: store.head(key),
        lambda: store.delete(key),
        lambda: store.delete(key, "1"),
        lambda: list(store.list_objects("p1")),
    ):
        with pytest.raises(StoreRefused, match="is not there; make the bucket"):
            call()


def test_an_account_without_the_role_is_refused_and_no_key_is_shown(gcs, monkeypatch):
    store = _opened(monkeypatch, gcs, key_file=gcs.strangers_key_file)
    key = chunk_key(b"x")
    for call in (store.ping, store.probe, lambda: store.put_bytes(key, b"x")):
        with pytest.raises(StoreRefused, match=r"forbidden|AccessDenied") as refused:
            call()
        assert "PRIVATE" not in str(refused.value)
        assert "Signature=" not in str(refused.value)
    assert send("", put_ticket(store, key, b"x"), b"x").status == 403


def test_a_key_that_google_does_not_know_is_refused_and_says_what_to_check(gcs, monkeypatch, tmp_path):
    """As after its deletion: the file is whole, and no token comes for it."""
    foreign = json.loads(gcs.key_file.read_text())
    foreign["private_key"] = json.loads(gcs.strangers_key_file.read_text())["private_key"]
    (tmp_path / "key.json").write_text(json.dumps(foreign))
    with pytest.raises(StoreRefused, match="check the key file"):
        _opened(monkeypatch, gcs, key_file=tmp_path / "key.json").ping()


@pytest.mark.rule("holds-outrank")
def test_a_bucket_that_retains_whatever_is_written_is_refused_at_the_probe(gcs, monkeypatch):
    store = _opened(monkeypatch, gcs, bucket=gcs.retaining_bucket)
    with pytest.raises(StoreRefused, match="retention policy"):
        store.probe()
    assert store.capabilities is None


@pytest.mark.rule("reuse-only-hashed")
def test_a_ticket_without_md5_still_holds_the_length_and_writes_once(gcs, monkeypatch):
    """From a client that was not asked for it, because the store had not been probed yet: the copy is unproven."""
    store = _opened(monkeypatch, gcs)
    data, key = secrets.token_bytes(100), chunk_key(b"no md5")
    ticket = store.presign_put(key, stored_bytes=100, stored_sha256=key.digest, expires_in_seconds=60)
    longer = {**ticket.headers, "content-length": "101"}
    assert send("", ticket, data + b"x", headers=longer).status == 403
    assert send("", ticket, data).status == 200
    assert send("", ticket, data[::-1]).status == 412
    assert store.head(key) == ObjectFacts(100, None, store.head(key).version_id)


@pytest.mark.rule("mark-before-delete")
def test_deleting_from_a_bucket_with_versions_leaves_no_bytes(gcs, monkeypatch):
    store = _opened(monkeypatch, gcs, bucket=gcs.versioned_bucket)
    assert store.probe().versioned
    for with_version in (True, False):
        key, neighbour = chunk_key(b"versioned"), chunk_key(b"versioned")
        for written in (key, neighbour):
            facts = store.put_bytes(written, b"versioned")
        store.delete(neighbour, facts.version_id) if with_version else store.delete(neighbour)
        # What was hidden by somebody else's delete is deleted as well.
        store.calls.delete(store.location.key_of(key.path), None)
        store.delete(key)
        assert list(store.calls.listed(store.location.key_prefix, "name", versions=True)) == []


def test_a_ticket_names_the_host_that_clients_see(gcs, monkeypatch):
    port = gcs.endpoint.rpartition(":")[2]
    store = _opened(monkeypatch, gcs, more=f"&public_endpoint=http://localhost:{port}")
    key = chunk_key(b"public")
    store.put_bytes(key, b"public")
    ticket = store.presign_get(key, expires_in_seconds=60)
    assert ticket.url.startswith(f"http://localhost:{port}/")
    assert fetch("", ticket).data == b"public"


def test_bytes_that_change_on_the_way_are_a_mismatch_and_nothing_is_stored(gcs, monkeypatch):
    store = _opened(monkeypatch, gcs)
    key = chunk_key(b"changed")
    with monkeypatch.context() as patch:
        patch.setattr(calls, "base64_md5", lambda data: base64_md5(data + b"x"))
        for size in (100, 9 * 1024 * 1024):  # in one request, and in an upload of several
            with pytest.raises(ObjectMismatch):
                store.put_bytes(key, bytes(size))
    with pytest.raises(ObjectMissing):
        store.head(key)


_ON_A_MACHINE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from holdfast_service.stores.base import make_tickets
from holdfast_service.stores.registry import open_store
from tests.support.stores import chunk_key, fetch, put_ticket, send

store = open_store(sys.argv[1], b"k" * 32)
found = store.probe()
assert found.md5_enforced and found.conditional_put and found.content_length_enforced, found
bodies = [bytes([number]) * 50 for number in range(40)]
keys = {body: chunk_key(body) for body in bodies}
tickets = make_tickets(store, lambda body: put_ticket(store, keys[body], body, expires_in_seconds=7 * 86400), bodies)
for body, ticket in zip(bodies, tickets, strict=True):
    assert send("", ticket, body).status == 200
    assert ticket.expires_in_seconds == 12 * 3600
assert fetch("", store.presign_get(keys[bodies[0]], expires_in_seconds=60)).data == bodies[0]
print(tickets[0].url.partition("X-Goog-Credential=")[2].partition("%2F")[0])
"""


def _on_a_machine(gcs, url: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GOOGLE_", "GCE_"))}
    return subprocess.run(
        [sys.executable, "-c", _ON_A_MACHINE, url],
        env=environment | gcs.machines_environment | {"HOME": os.devnull},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_machine_without_a_key_has_google_sign(gcs):
    """In a process of its own, because google-auth reads the machine's environment when it is imported."""
    done = _on_a_machine(gcs, gcs.store_url_for(secrets.token_hex(4)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == gcs.machine.replace("@", "%40")


def test_a_machine_that_may_not_sign_is_told_which_role_is_missing(gcs):
    done = _on_a_machine(gcs, gcs.store_url_for(secrets.token_hex(4)) + f"&service_account={gcs.service_account}")
    assert "roles/iam.serviceAccountTokenCreator" in done.stderr.splitlines()[-1]


def test_short_reads_raise_instead_of_ending(gcs, monkeypatch):
    """The connection breaks in the middle of an object: its first half must not pass for the whole."""
    store = _opened(monkeypatch, gcs)
    key = chunk_key(b"large")
    store.put_bytes(key, secrets.token_bytes(32 * 1024 * 1024))
    pieces = store.open_read(key)
    next(pieces)
    gcs.stop()
    try:
        with pytest.raises(StoreUnavailable):
            for _ in pieces:
                pass
    finally:
        gcs.start()
