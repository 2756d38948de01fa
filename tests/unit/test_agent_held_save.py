"""A save that the node agent makes for a rank that is gone, or that only seems to be."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from holdfast_client.agent import held_save
from holdfast_client.agent.held_save import HeldSave, Ledger
from holdfast_client.agent.messages import HandOver, StagedChunk
from holdfast_client.errors import CheckpointAborted, IntegrityError, StoreRefused, TransferStopped
from holdfast_protocol.checkpoints import BeginCheckpoint, IndexOrdinals, ShardSummary
from holdfast_protocol.digests import chunk_digest
from holdfast_protocol.states import AbortCause, CheckpointKind, CheckpointState


class Writer:
    """In place of a ShardWriter, whose every try fails for good."""

    begin_failed = False
    told: list[str]

    def __init__(self, *_, **__):
        return

    def upload_and_seal_again(self, *_):
        raise StoreRefused("the store takes nothing")

    def fail(self, error):
        self.told.append(str(error))


class Parts:
    """In place of the rank's client and the job's calls, which no try comes to."""

    calls = None

    def retrying(self, _seconds):
        return self


def save_of(lives, *, retry_seconds=0, bodies=(), is_proven=True, **how):
    hand = HandOver(
        project="p",
        run="r",
        epoch=1,
        attempt=1,
        launch_id="a" * 8,
        number=1,
        step=1,
        kind=CheckpointKind.PERIODIC,
        world_size=1,
        rank=0,
        memory=1,
        chunks=[StagedChunk(start=start, bytes=4) for start in range(0, 4 * len(bodies), 4)],
        documents=[],
        index=IndexOrdinals(shard=0, layout=1),
        summary=ShardSummary(components={}),
        retry_seconds=retry_seconds,
        is_proven=is_proven,
    )
    parts = Parts()
    return HeldSave(
        hand,
        memoryview(b"".join(bodies)),
        [],
        client=parts,
        workers=None,
        job=parts,
        rank_lives=lambda: lives,
        ledger=Ledger(),
        **how,
    )


@pytest.mark.parametrize("lives", [True, False])
def test_only_for_a_dead_rank_the_service_hears_that_it_has_failed(lives, monkeypatch):
    monkeypatch.setattr(held_save, "ShardWriter", Writer)
    monkeypatch.setattr(Writer, "told", [], raising=False)
    save = save_of(lives)
    save.finish()
    assert save.is_over
    assert len(Writer.told) == (0 if lives else 1)


class SealingWriter:
    """In place of a ShardWriter that has sent everything."""

    digests = ("d" * 64,)

    def __init__(self, *_, **__):
        return

    def upload_and_seal_again(self, _chunks, describe):
        describe()
        return SimpleNamespace(id="c", state=CheckpointState.COMMITTED)

    def stop(self):
        return


def test_what_is_not_proven_is_sealed_once_its_rank_says_so(monkeypatch):
    monkeypatch.setattr(held_save, "ShardWriter", SealingWriter)
    save = save_of(lives=True, is_proven=False)
    asked = []
    save.on_sealing = lambda: asked.append(save.is_sealed) or save.prove()
    save.write(save.writer(0), save.hand.summary)
    assert save.is_sealed
    assert asked == [False]
    assert save.hand.is_proven, "a copy of it may be sealed too"
    save.write(save.writer(0), save.hand.summary)
    assert asked == [False], "it is proven for good"


def test_each_seal_of_what_is_not_proven_asks_anew(monkeypatch):
    monkeypatch.setattr(held_save, "ShardWriter", SealingWriter)
    save = save_of(lives=True, is_proven=False)
    asked = []
    save.on_sealing = lambda: asked.append(1) or save.allow_seal()
    for _ in range(2):
        save.write(save.writer(0), save.hand.summary)
    assert (len(asked), save.hand.is_proven) == (2, False)


def test_what_is_not_proven_waits_for_its_rank_until_it_is_stopped(monkeypatch):
    monkeypatch.setattr(held_save, "ShardWriter", SealingWriter)
    save = save_of(lives=True, is_proven=False)
    save.on_sealing = save._stopped.set
    with pytest.raises(TransferStopped):
        save.write(save.writer(0), save.hand.summary)
    assert not save.is_sealed


def test_what_is_not_proven_is_not_sealed_for_a_dead_rank(monkeypatch, caplog):
    monkeypatch.setattr(held_save, "ShardWriter", SealingWriter)
    save = save_of(lives=False, is_proven=False)
    save.finish()
    assert (save.is_over, save.is_sealed, save.is_committed) == (True, False, False)
    assert "was gone before it knew whether training had written" in caplog.text


class SlowWriter:
    """In place of a ShardWriter, which uploads for longer than the agent retries a call."""

    clock: list[float]
    digests = ("d" * 64,)

    def __init__(self, *_, **__):
        return

    def upload_and_seal_again(self, *_):
        self.clock[0] += 3600
        return SimpleNamespace(id="c", state=CheckpointState.UPLOADING)


def test_however_long_the_upload_took_the_other_ranks_have_their_time_to_seal(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(held_save, "ShardWriter", SlowWriter)
    monkeypatch.setattr(SlowWriter, "clock", clock, raising=False)
    monkeypatch.setattr(held_save, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    sealed = SimpleNamespace(id="c", state=CheckpointState.COMMITTED)
    monkeypatch.setattr(Parts, "checkpoints", SimpleNamespace(get=lambda *_, **__: sealed), raising=False)
    save = save_of(lives=False, retry_seconds=60)
    save.finish()
    assert save.is_committed


class WriterAfterTheEnd:
    """In place of a ShardWriter, whose first try is aborted because the attempt has ended."""

    begins: list[BeginCheckpoint]
    digests = ()

    def __init__(self, _client, _run, _rank, begin, **_):
        self.begins.append(begin)

    def upload_and_seal_again(self, *_):
        if len(self.begins) == 1:
            raise CheckpointAborted("attempt 1 has ended", context={"cause": AbortCause.ATTEMPT_ENDED})
        return SimpleNamespace(state=CheckpointState.COMMITTED)


def test_a_dead_ranks_save_is_late_and_begun_again_if_its_attempt_was_told_ended_meanwhile(monkeypatch, caplog):
    monkeypatch.setattr(held_save, "ShardWriter", WriterAfterTheEnd)
    monkeypatch.setattr(WriterAfterTheEnd, "begins", [], raising=False)
    caplog.set_level("INFO", "holdfast.agent")
    save_of(lives=False).finish()
    assert [begin.origin_attempt for begin in WriterAfterTheEnd.begins] == [1, 1]
    assert "committed for a rank that is gone" in caplog.text


BODIES = [b"aaaa", b"bbbb", b"cccc"]


class LoadingWriter:
    """In place of a ShardWriter: loads the chunks, and keeps what it was told of them."""

    begin_failed = False
    on_hashed = None
    taken: list[tuple[bytes, str | None]]

    def __init__(self, *_, **__):
        return

    def upload_and_seal_again(self, chunks, _describe):
        for ordinal, chunk in enumerate(chunks()):
            body = bytes(chunk.load(threading.Event()))
            self.taken.append((body, chunk.digest))
            self.on_hashed(ordinal, chunk_digest(body))
        raise StoreRefused("the store takes nothing")


def test_for_copies_only_what_the_upload_has_not_come_to_is_hashed_from_the_end(monkeypatch):
    monkeypatch.setattr(held_save, "ShardWriter", LoadingWriter)
    monkeypatch.setattr(LoadingWriter, "taken", [], raising=False)
    hashed = []
    monkeypatch.setattr(held_save, "chunk_digest", lambda body: (hashed.append(bytes(body)), chunk_digest(body))[1])
    save = save_of(lives=True, bodies=BODIES)
    for _ in range(2):
        with pytest.raises(StoreRefused):
            save.write(save.writer(0), ShardSummary(components={}))
    assert {digest for _, digest in LoadingWriter.taken} == {None}, "each try proves what it sends"
    assert save.hash_all() == [chunk_digest(body) for body in BODIES]
    assert hashed == []
    fresh = save_of(lives=True, bodies=BODIES)
    assert fresh.hash_all() == save.hash_all()
    assert hashed == BODIES[::-1]
    fresh.is_released = True
    assert fresh.hash_all() is None, "its memory may hold another save by now"


def test_a_copy_that_has_changed_in_memory_is_not_sent(monkeypatch):
    monkeypatch.setattr(held_save, "ShardWriter", LoadingWriter)
    monkeypatch.setattr(LoadingWriter, "taken", [], raising=False)
    digests = [chunk_digest(body) for body in BODIES]
    rotten = save_of(lives=False, bodies=[BODIES[0], b"bbxb", BODIES[2]], digests=digests)
    with pytest.raises(IntegrityError, match="has changed in memory"):
        rotten.write(rotten.writer(0), ShardSummary(components={}))
    assert LoadingWriter.taken == [(BODIES[0], digests[0])]
