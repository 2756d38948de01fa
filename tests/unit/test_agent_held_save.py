"""A save that the node agent makes for a rank that is gone, or that only seems to be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from holdfast_client.agent import held_save
from holdfast_client.agent.held_save import HeldSave, Ledger
from holdfast_client.agent.messages import HandOver
from holdfast_client.errors import CheckpointAborted, StoreRefused
from holdfast_protocol.checkpoints import BeginCheckpoint, IndexOrdinals, ShardSummary
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


def save_of(lives, *, retry_seconds=0):
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
        chunks=[],
        documents=[],
        index=IndexOrdinals(shard=0, layout=1),
        summary=ShardSummary(components={}),
        retry_seconds=retry_seconds,
    )
    parts = Parts()
    return HeldSave(
        hand, memoryview(b""), [], client=parts, workers=None, job=parts, rank_lives=lambda: lives, ledger=Ledger()
    )


@pytest.mark.parametrize("lives", [True, False])
def test_only_for_a_dead_rank_the_service_hears_that_it_has_failed(lives, monkeypatch):
    monkeypatch.setattr(held_save, "ShardWriter", Writer)
    monkeypatch.setattr(Writer, "told", [], raising=False)
    save = save_of(lives)
    save.finish()
    assert save.is_over
    assert len(Writer.told) == (0 if lives else 1)


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
