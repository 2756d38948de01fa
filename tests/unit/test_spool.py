"""The spool of a local tier: a save is wholly in it or not at all, whatever dies where, and torn records are told."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.errors import ChunkCorrupt, ConfigurationError, LocalReadFailed
from holdfast_client.local.push import spooled_chunks
from holdfast_client.local.room import Room
from holdfast_client.local.spool import (
    FOLDER,
    SaveKey,
    SpooledChunk,
    SpoolRecord,
    decode_record,
    pushers,
    record_name,
    saves_of,
)
from holdfast_client.local.tier import LocalTier, NoRoom, keep_shard
from holdfast_protocol.checkpoints import Component, IndexOrdinals, MetricValue
from holdfast_protocol.digests import DocumentError
from holdfast_protocol.states import CheckpointKind

LIMIT = 1_000_000


def record_of(chunks: list[SpooledChunk], **changes: object) -> SpoolRecord:
    facts: dict[str, object] = {
        "project": "demo",
        "run": "gpt",
        "epoch": 1,
        "attempt": 3,
        "launch_id": "launch-3",
        "number": 7,
        "step": 1200,
        "kind": CheckpointKind.PERIODIC,
        "world_size": 2,
        "rank": 1,
        "chunks": chunks,
        "index": IndexOrdinals(shard=len(chunks) - 1),
        "components": {"model": Component(kind="model", logical_bytes=10)},
        "finite": True,
        "metrics": {"loss": MetricValue.of(float("nan"))},
        "host": "node1",
        "created_at": datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    }
    return SpoolRecord.model_validate(facts | changes)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def keep(tier: LocalTier, chunks: list[bytes | OutgoingChunk], **changes: object) -> SpoolRecord:
    facts = {"launch_id": "launch-3", "number": 7, "rank": 1} | changes
    name = record_name(str(facts["launch_id"]), int(str(facts["number"])), int(str(facts["rank"])))
    outgoing = [OutgoingChunk.of(chunk) if isinstance(chunk, bytes) else chunk for chunk in chunks]
    with TransferWorkers(2) as workers:
        return keep_shard(
            tier.spool,
            name,
            outgoing,
            lambda kept: record_of(kept, **changes),
            workers=workers,
        )


@pytest.fixture
def tier(tmp_path: Path):
    opened = LocalTier(tmp_path / "nvme", LIMIT)
    yield opened
    opened.close()


def reopened(tier: LocalTier) -> LocalTier:
    """As another process sees it."""
    return LocalTier(tier.path, LIMIT)


def spool_files(tier: LocalTier) -> list[str]:
    return sorted(os.listdir(tier.path / FOLDER))


def test_a_record_comes_back_as_it_was():
    record = record_of([SpooledChunk(digest=digest_of(b"a"), bytes=1)])
    assert decode_record(record.encode()) == record


@pytest.mark.rule("late-save-adoption")
@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_a_torn_record_is_told_from_a_whole_one(cut):
    document = record_of([SpooledChunk(digest=digest_of(b"a"), bytes=1)]).encode()
    with pytest.raises(DocumentError):
        decode_record(document[:cut])


@pytest.mark.rule("late-save-adoption")
def test_a_record_with_one_flipped_bit_is_refused():
    document = bytearray(record_of([SpooledChunk(digest=digest_of(b"a"), bytes=1)]).encode())
    at = document.index(b"1200") + 1
    document[at] ^= 1
    with pytest.raises(DocumentError, match="torn or altered"):
        decode_record(bytes(document))


def test_a_record_whose_digest_is_no_digest_is_refused():
    with pytest.raises(DocumentError, match="torn or altered"):
        decode_record(b'{"record": {}, "sha256": "\\u00e9"}')


def test_a_record_of_a_newer_version_is_left_to_that_version():
    document = record_of([SpooledChunk(digest=digest_of(b"a"), bytes=1)]).encode()
    newer = document.replace(b'"version":1', b'"version":2')
    body = newer[len(b'{"record":') : newer.rindex(b',"sha256"')]
    newer = newer.replace(newer[-66:-2], digest_of(body).encode())
    with pytest.raises(DocumentError, match="newer version"):
        decode_record(newer)


def test_what_was_kept_is_read_back_by_another_process_and_every_chunk_is_held(tier):
    kept = keep(tier, [b"a" * 1000, b"b" * 1000, b"a" * 1000])
    other = reopened(tier)
    assert other.spool.read().records == (kept,)
    assert other.folder.hold(kept.name).digests() == {digest_of(b"a" * 1000), digest_of(b"b" * 1000)}
    loaded = [bytes(chunk.load(threading.Event())) for chunk in spooled_chunks(other.folder, kept)]
    assert loaded == [b"a" * 1000, b"b" * 1000, b"a" * 1000]
    other.close()


@pytest.mark.parametrize("body", [b"", b"state"])
def test_memory_to_read_a_chunk_into_is_not_cleared_under_the_interpreters_lock(tier, body):
    [chunk] = spooled_chunks(tier.folder, keep(tier, [body]))
    loaded = chunk.load(threading.Event())
    assert loaded == body
    assert isinstance(loaded.obj, mmap.mmap)


@pytest.mark.rule("late-save-adoption")
@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize(
    "trouble", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.ESTALE], ids=os.strerror
)
def test_a_moments_trouble_with_the_disk_does_not_condemn_what_is_in_the_spool(tier, monkeypatch, call, trouble):
    kept = keep(tier, [b"a" * 1000])
    [chunk] = spooled_chunks(tier.folder, kept)

    def refused(*args, **rest):
        raise OSError(trouble, os.strerror(trouble))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refused)
        with pytest.raises(LocalReadFailed, match=os.strerror(trouble)):
            chunk.load(threading.Event())
    assert bytes(chunk.load(threading.Event())) == b"a" * 1000


@pytest.mark.rule("late-save-adoption")
@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
def test_what_is_not_there_or_has_other_bytes_is_corrupt(tier, monkeypatch, how):
    kept = keep(tier, [b"a" * 1000])
    file = tier.path / kept.chunks[0].digest[:2] / kept.chunks[0].digest
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(b"a" * 999 if how == "cut" else b"b" + b"a" * 999)
        # The disk has become read-only: the wrong file cannot be removed.
        monkeypatch.setattr(Room, "remove", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
    [chunk] = spooled_chunks(tier.folder, kept)
    with pytest.raises(ChunkCorrupt):
        chunk.load(threading.Event())


@pytest.mark.rule("late-save-adoption")
def test_no_other_save_evicts_what_is_not_committed_and_a_full_folder_says_so(tier):
    kept = keep(tier, [bytes([n]) * 150_000 for n in range(6)])
    with pytest.raises(NoRoom):
        keep(tier, [b"x" * 150_000], number=8)
    assert tier.spool.read().records == (kept,), "nothing of the save without room stays"
    assert tier.folder.holds() == [kept.name]
    assert all(tier.folder.size(chunk.digest) == chunk.bytes for chunk in kept.chunks)
    tier.spool.forget(kept.name)
    assert keep(tier, [b"x" * 150_000], number=8).number == 8


def test_a_save_that_fails_half_way_leaves_neither_claim_nor_hold(tier):
    def torn(stop):
        raise OSError(5, "the device is gone")

    with pytest.raises(OSError, match="device"):
        keep(tier, [b"a" * 100, OutgoingChunk(torn)])
    assert spool_files(tier) == []
    assert tier.folder.holds() == []


@pytest.mark.rule("late-save-adoption")
@pytest.mark.parametrize("dies", ["with a claim", "with a hold", "with chunks", "with a record", "with the hold left"])
def test_what_a_killed_process_leaves_is_a_whole_save_or_nothing(tier, dies):
    """Each state is what kill -9 leaves between two steps of keeping or forgetting."""
    data = b"d" * 1000
    record = record_of([SpooledChunk(digest=digest_of(data), bytes=len(data))])
    child = os.fork()
    if child == 0:
        with tier.spool.claim(record.name) as claim:
            if dies != "with a claim":
                claim.hold.add([digest_of(data)])
            if dies not in ("with a claim", "with a hold"):
                tier.folder.add(digest_of(data), data, durable=True)
            if dies in ("with a record", "with the hold left"):
                claim.keep(record)
            if dies == "with the hold left":
                os.unlink(tier.path / FOLDER / f"{record.name}.json")
            os._exit(0)
    os.waitpid(child, 0)
    other = reopened(tier)
    whole = dies == "with a record"
    assert other.spool.read().records == ((record,) if whole else ())
    assert other.folder.holds() == ([record.name] if whole else [])
    assert spool_files(other) == ([f"{record.name}.json"] if whole else [])
    other.close()


def test_a_save_in_the_making_is_left_alone_by_other_processes(tier):
    record = record_of([SpooledChunk(digest=digest_of(b"d"), bytes=1)])
    with tier.spool.claim(record.name) as claim:
        claim.hold.add([digest_of(b"d")])
        reopened(tier).close()
        tier.folder.add(digest_of(b"d"), b"d", durable=True)
        claim.keep(record)
    assert tier.spool.read().records == (record,)
    assert tier.folder.holds() == [record.name]


@pytest.mark.rule("late-save-adoption")
def test_a_torn_file_in_the_spool_is_told_and_does_not_hide_the_others(tier):
    kept = keep(tier, [b"a" * 100])
    torn = record_name("launch-3", 8, 1)
    (tier.path / FOLDER / f"{torn}.json").write_bytes(kept.encode()[:100])
    spooled = tier.spool.read()
    assert spooled.records == (kept,)
    assert [bad.name for bad in spooled.bad] == [torn]


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        LocalTier(tmp_path / "open", LIMIT)


def test_another_users_folder_is_refused_by_that_name(tmp_path, monkeypatch):
    """`chmod` would not help there: it is not this user's."""
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ConfigurationError, match=f"{tmp_path} belongs to another user. Run this as that user"):
        LocalTier(tmp_path, LIMIT)


def test_saves_come_in_the_order_in_which_they_were_staged():
    chunks = [SpooledChunk(digest=digest_of(b"a"), bytes=1)]
    # The same step twice: an aborted save, and the one that took its place.
    staged = [
        record_of(chunks, attempt=a, number=n, step=s, rank=r)
        for a, n, s in ((2, 1, 9), (3, 1, 5), (3, 2, 5))
        for r in (0, 1)
    ]
    assert [(save.key.attempt, save.key.number) for save in saves_of(reversed(staged))] == [(2, 1), (3, 1), (3, 2)]
    assert [[record.rank for record in save.records] for save in saves_of(staged)] == [[0, 1]] * 3


def test_the_lowest_rank_that_holds_a_shard_pushes_it_and_missing_ones_are_named():
    key = SaveKey.of(record_of([SpooledChunk(digest=digest_of(b"a"), bytes=1)]))
    found = pushers([(3, key, 0), (1, key, 0), (2, key, 0)])
    assert found == {key: {0: 1}}
    assert key.missing(found[key]) == [1]
