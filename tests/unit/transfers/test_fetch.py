"""Many chunks on their way down, against a small service with a store, and its faults."""

from __future__ import annotations

import threading
from itertools import count

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks import fetcher as fetcher_module
from holdfast_client.chunks import transfer
from holdfast_client.chunks.fetcher import Buffers, ShardFetcher
from tests.support.transfers import client_of, fetch, some_chunks


def test_fetching_gives_each_chunk_once_under_one_lease_that_is_given_back(service):
    chunks = some_chunks(200, size=500)
    service.objects = dict(chunks)
    assert fetch(service, [*chunks, *chunks]) == chunks
    reads = [seen.json for seen in service.of("POST", "/v1/checkpoints/ck_1/reads")]
    assert reads[0]["lease_id"] is None
    assert {call["lease_id"] for call in reads[1:]} == {"lease-1"}
    assert sum(len(call["digests"]) for call in reads) == 200
    assert max(len(call["digests"]) for call in reads) <= fetcher_module.TICKETS_AT_ONCE
    assert len(service.of("DELETE", "/v1/read-leases/lease-1")) == 1


@pytest.mark.parametrize("newer", [True, False])
def test_a_chunk_list_comes_along_with_the_first_tickets_or_is_asked_for(service, newer):
    chunks = some_chunks(100)
    service.objects = dict(chunks)
    service.lists_chunks = newer
    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        fetcher.fetch(chunks, lambda *_: None, shard=3)
        assert fetcher.chunk_list(3).digest == "d3"
        assert fetcher.chunk_list(4).digest == "d4"
    asked = [seen.json["shard"] for seen in service.of("POST", "/v1/checkpoints/ck_1/reads")]
    assert asked == [3, None], "with the first tickets only"
    alone = [seen.path.rpartition("/")[2] for seen in service.seen if "/shards/" in seen.path]
    assert alone == (["4"] if newer else ["3", "4"])


def test_a_chunk_arrives_in_the_buffer_that_it_is_given_if_it_fits(service):
    chunks = some_chunks(3)
    service.objects = dict(chunks)
    fits, too_short, _ = chunks
    into = {fits: memoryview(bytearray(len(chunks[fits]))), too_short: memoryview(bytearray(7))}
    views = {}
    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        fetcher.fetch(chunks, lambda digest, view: views.__setitem__(digest, (view, bytes(view))), into)
    assert {digest: body for digest, (_, body) in views.items()} == chunks
    assert [digest for digest, (view, _) in views.items() if view is into.get(digest)] == [fits]
    assert into[too_short] == bytes(7)


@pytest.mark.parametrize("told", [{"sizes": 5}, {"most_bytes": 5}], ids=["another size", "too large"])
def test_no_memory_is_taken_for_a_size_that_the_layout_does_not_have(service, monkeypatch, told):
    chunks = some_chunks(3)
    service.objects = dict(chunks)
    lent = []
    borrow = Buffers.borrow
    monkeypatch.setattr(Buffers, "borrow", lambda self, size: (lent.append(size), borrow(self, size))[1])
    limits = {"sizes": dict.fromkeys(chunks, 5)} if "sizes" in told else told
    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        with pytest.raises(errors.IntegrityError, match="layout"):
            fetcher.fetch(chunks, lambda *_: None, **limits)
    assert lent == []


def test_what_has_just_the_size_that_the_layout_says_is_fetched(service):
    chunks = some_chunks(3)
    service.objects = dict(chunks)
    sizes = {digest: len(body) for digest, body in chunks.items()}
    found = {}
    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        fetcher.fetch(
            chunks,
            lambda digest, view: found.__setitem__(digest, bytes(view)),
            sizes=sizes,
            most_bytes=max(sizes.values()),
        )
    assert found == chunks


@pytest.mark.parametrize("fault", ["refused ticket", "dead ticket", "slow down"])
def test_a_fetch_survives(service, fault):
    service.faults[fault] = 3
    chunks = some_chunks()
    service.objects = dict(chunks)
    assert fetch(service, chunks) == chunks
    assert service.faults[fault] == 0


@pytest.mark.rule("report-is-suspicion")
def test_a_corrupt_chunk_is_reported_and_read_again_if_the_service_finds_a_good_copy(service):
    chunks = some_chunks()
    service.objects = dict(chunks)
    service.readable = set(chunks)
    service.faults["flipped"] = 1
    assert fetch(service, chunks) == chunks
    (report,) = service.of("POST", "/v1/checkpoints/ck_1/chunk-reports")
    assert report.json["problem"] == "mismatch"


@pytest.mark.rule("report-is-suspicion")
@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_a_lost_chunk_is_named_and_never_delivered(service, damage):
    chunks = some_chunks()
    service.objects = dict(chunks)
    lost = list(chunks)[7]
    if damage == "gone":
        del service.objects[lost]
    else:
        service.objects[lost] = bytes(10_007)
    found = {}
    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        with pytest.raises(errors.ChunkLost) as caught:
            fetcher.fetch(chunks, lambda digest, view: found.__setitem__(digest, bytes(view)))
    assert caught.value.digest == lost
    assert caught.value.corrupt_checkpoints == ["ck_1"]
    assert "no copy has its bytes" in str(caught.value)
    assert lost not in found
    assert all(chunks[digest] == body for digest, body in found.items())


@pytest.mark.rule("report-is-suspicion")
def test_bytes_that_only_arrive_wrong_here_are_not_read_for_ever(service):
    chunks = some_chunks(1)
    service.objects = dict(chunks)
    service.readable = set(chunks)
    service.faults["flipped"] = 10_000
    with pytest.raises(errors.ReadsWrongHere, match="wrong twice") as caught:
        fetch(service, chunks)
    assert not isinstance(caught.value, errors.IntegrityError), "the checkpoint is whole"


def test_a_file_that_reads_wrong_is_read_again_over_http(mounted, tmp_path):
    chunks = some_chunks(3)
    mounted.objects = dict(chunks)
    mounted.readable = set(chunks)
    (tmp_path / "incoming").mkdir()
    for digest, body in chunks.items():
        (tmp_path / "incoming" / digest).write_bytes(body)
    stale = list(chunks)[1]
    (tmp_path / "incoming" / stale).unlink()
    assert fetch(mounted, chunks) == chunks
    assert len(mounted.of("GET", f"/store/{stale}")) == 1


def test_what_a_mount_does_not_give_any_more_comes_over_http(mounted, monkeypatch):
    def fails(*_):
        raise errors.StoreUnavailable("The store's filesystem failed (EIO)")

    monkeypatch.setattr(transfer, "read_file", fails)
    chunks, found = some_chunks(), {}
    mounted.objects = dict(chunks)
    settings = ClientSettings(url=mounted.url, token="hold_t_s", retry_seconds=0)
    with Client(settings) as client, ShardFetcher(client, "ck_1") as fetcher:
        fetcher.fetch(chunks, lambda digest, view: found.__setitem__(digest, bytes(view)))
    assert found == chunks


@pytest.mark.rule("drop-box")
def test_no_file_outside_of_the_mount_is_read(mounted, tmp_path):
    chunks = some_chunks(3)
    mounted.objects = dict(chunks)
    outside = tmp_path.with_name(f"{tmp_path.name} beside")
    outside.mkdir()
    for digest, body in chunks.items():
        (outside / digest).write_bytes(body)
    real_ticket = mounted.ticket

    def elsewhere(digest, proven):
        ticket = real_ticket(digest, proven)
        return {**ticket, "path": f"{tmp_path}/../{outside.name}/{digest}"} if ticket["kind"] == "file" else ticket

    mounted.ticket = elsewhere
    assert fetch(mounted, chunks) == chunks
    assert len([seen for seen in mounted.seen if seen.path.startswith("/store/")]) == 3


def test_what_on_chunk_raises_ends_the_fetch(service):
    chunks = some_chunks()
    service.objects = dict(chunks)

    def refuse(digest, view):
        raise RuntimeError("does not fit")

    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        with pytest.raises(RuntimeError, match="does not fit"):
            fetcher.fetch(chunks, refuse)


@pytest.mark.rule("read-lease")
def test_a_slow_fetch_renews_its_lease(service, monkeypatch):
    monkeypatch.setattr(fetcher_module, "_RENEW_LEASE_AT", 0.002)
    chunks = some_chunks(2)
    service.objects = dict(chunks)
    answer, calls, renewed = service.reads, count(1), threading.Event()

    def reads_of(body):
        if next(calls) == 3:
            renewed.set()
        return answer(body)

    service.reads = reads_of
    with client_of(service) as client, ShardFetcher(client, "ck_1") as fetcher:
        fetcher.fetch(chunks, lambda *_: renewed.wait(60))
    reads = [seen.json for seen in service.of("POST", "/v1/checkpoints/ck_1/reads")]
    assert len(reads) >= 3
    assert {call["lease_id"] for call in reads[1:]} == {"lease-1"}
