"""posix, for a client that sees the mount and hands files over."""

from __future__ import annotations

import os
import resource
import secrets
import time

import pytest

from holdfast_service.stores.base import ObjectMismatch, ObjectMissing, StoreFull
from holdfast_service.stores.registry import open_store
from tests.contract.backends import Backend
from tests.contract.posix_outage import unmounted
from tests.contract.suite import StoreContract
from tests.support.stores import chunk_key


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    root = tmp_path_factory.mktemp("posix") / "store"
    store = open_store(f"posix://{root}", b"k" * 32)

    def hand_in(key, data):
        ticket_id = secrets.token_hex(16)
        store.incoming_path(ticket_id).write_bytes(data)
        store.publish(ticket_id, key, len(data))

    return Backend(
        store,
        hand_in,
        proves=False,
        reopen=lambda: open_store(f"posix://{root}", b"k" * 32),
        outage=lambda: unmounted(root),
    )


class TestStore(StoreContract):
    pass


def _handed_over(store, data: bytes) -> str:
    ticket_id = secrets.token_hex(16)
    store.incoming_path(ticket_id).write_bytes(data)
    return ticket_id


@pytest.mark.rule("protocol-18")
def test_what_is_written_but_not_published_is_not_visible_and_is_swept(backend):
    store, key = backend.store, chunk_key(b"half")
    ticket_id = _handed_over(store, b"half")
    with pytest.raises(ObjectMissing):
        store.head(key)
    assert key not in {found.key for found in store.list_objects("p1")}
    store.sweep_incoming(older_than_seconds=3600)
    assert store.incoming_path(ticket_id).exists()
    os.utime(store.incoming_path(ticket_id), (0, 0))
    assert store.sweep_incoming(older_than_seconds=3600) >= 1
    assert not store.incoming_path(ticket_id).exists()


@pytest.mark.rule("protocol-18")
def test_publishing_twice_is_fine_and_overwrites_nothing(backend):
    store, key = backend.store, chunk_key(b"first")
    ticket_id = _handed_over(store, b"first")
    for _ in range(2):
        store.publish(ticket_id, key, 5)
    store.publish(_handed_over(store, b"other"), key, 5)
    assert store.object_path(key).read_bytes() == b"first"
    assert list((store.root / "incoming").iterdir()) == []


@pytest.mark.rule("protocol-18")
def test_a_file_that_is_not_seen_yet_is_missing_so_that_the_caller_can_ask_again(backend):
    store, key, ticket_id = backend.store, chunk_key(b"late"), secrets.token_hex(16)
    with pytest.raises(ObjectMissing):
        store.publish(ticket_id, key, 4)
    store.incoming_path(ticket_id).write_bytes(b"late")
    store.publish(ticket_id, key, 4)
    assert store.head(key).bytes == 4


@pytest.mark.parametrize("announced", [3, 5, 0])
def test_another_size_is_a_mismatch_and_the_file_is_gone(backend, announced):
    store, key = backend.store, chunk_key(b"four")
    ticket_id = _handed_over(store, b"four")
    with pytest.raises(ObjectMismatch):
        store.publish(ticket_id, key, announced)
    assert not store.incoming_path(ticket_id).exists()
    with pytest.raises(ObjectMissing):
        store.head(key)


@pytest.mark.rule("protocol-18")
def test_links_and_pipes_cannot_pull_other_files_into_the_store(backend, tmp_path):
    store, key = backend.store, chunk_key(b"secret")
    (tmp_path / "secret").write_bytes(b"secret")
    for make in (lambda path: path.symlink_to(tmp_path / "secret"), os.mkfifo, os.mkdir):
        ticket_id = secrets.token_hex(16)
        make(store.incoming_path(ticket_id))
        with pytest.raises(ObjectMismatch):
            store.publish(ticket_id, key, 6)
        with pytest.raises(ObjectMissing):
            store.head(key)


@pytest.mark.rule("protocol-18")
def test_a_ticket_id_is_no_path(backend):
    for ticket_id in ("../../etc/passwd", "short", "a/b-c-d-e-f", ".hidden-file", "x" * 65):
        with pytest.raises(ValueError, match="ticket id"):
            backend.store.incoming_path(ticket_id)


@pytest.mark.rule("protocol-18")
def test_only_who_reads_the_fresh_nonce_proves_the_mount(backend, monkeypatch):
    store = backend.store
    proof_id, path = store.new_mount_proof(expires_in_seconds=60)
    content = path.read_text()
    other_id, _ = store.new_mount_proof(expires_in_seconds=60)
    assert store.check_mount_proof(proof_id, content)
    assert not store.check_mount_proof(proof_id, content[:-1] + ("0" if content[-1] != "0" else "1"))
    assert not store.check_mount_proof(proof_id, "")
    assert not store.check_mount_proof(other_id, content)
    assert not store.check_mount_proof("f" * 32, content)
    assert not store.check_mount_proof("../incoming/x", content)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert not store.check_mount_proof(proof_id, content)
    store.sweep_incoming(older_than_seconds=3600)
    assert not path.exists()


def test_a_full_disk_is_named_and_leaves_nothing(backend):
    """The process's own file size limit stands for the disk: the write fails in the middle, in the same way."""
    store, key = backend.store, chunk_key(b"too much")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * 1024, hard))
    try:
        with pytest.raises(StoreFull, match="free some room"):
            store.put_bytes(key, bytes(2 * 1024 * 1024))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((store.root / "incoming").iterdir()) == []
    with pytest.raises(ObjectMissing):
        store.head(key)


@pytest.mark.rule("protocol-14")
def test_only_the_service_can_say_that_a_file_was_hashed(backend):
    store, key = backend.store, chunk_key(b"data")
    store.publish(_handed_over(store, b"data"), key, 4)
    proof = store.object_path(key).with_name(key.generation + ".sha256")
    for torn in ("", key.digest[:20], key.digest.upper(), key.digest + "0"):
        proof.write_text(torn)
        assert store.head(key).sha256 is None
    assert [found.key for found in store.list_objects("p1")].count(key) == 1
