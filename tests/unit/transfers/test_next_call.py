"""When a call of the uploader is due, and what it carries."""

from __future__ import annotations

from holdfast_client.chunks.uploader import REPORT_SECONDS, NextCall
from holdfast_protocol.checkpoints import MAX_BATCH

MOST = 1024
RUNNING = {"all_hashed": False, "stuck": False}


def calls_of(chunks: int, chunk_bytes: int, *, senders_idle: bool) -> list[int]:
    """Chunks offered per call, where each is hashed after the last call was answered."""
    waiting = NextCall(MOST, now=0.0)
    sizes = []
    for number in range(chunks):
        waiting.offer(str(number), chunk_bytes)
        last = number == chunks - 1
        if waiting.is_due(0.0, senders_idle=senders_idle, all_hashed=last, stuck=False):
            sizes.append(len(waiting.begin().offered))
            waiting.end(0.0)
    return sizes


def test_offers_begin_small_and_grow_as_far_as_the_end_of_the_save_allows():
    assert calls_of(32, 32, senders_idle=True) == [1, 1, 2, *[4] * 7]
    assert calls_of(32, 32, senders_idle=False) == [8] * 4, "nobody waits for a ticket"


def test_while_a_call_is_under_way_the_next_one_gathers():
    waiting = NextCall(MOST, now=0.0)
    waiting.offer("a", MOST)
    assert waiting.begin() == (["a"], [])
    waiting.offer("b", MOST)
    waiting.report("a", MOST)
    assert not waiting.is_due(100.0, senders_idle=True, all_hashed=True, stuck=True)
    waiting.end(100.0)
    assert waiting.is_due(100.0, senders_idle=True, **RUNNING)
    assert waiting.begin() == (["b"], ["a"])


def test_what_was_sent_is_reported_without_an_offer_when_it_is_much_or_old_or_waited_for():
    def reported(size: int, *, now: float = 0.0, stuck: bool = False) -> bool:
        waiting = NextCall(MOST, now=0.0)
        waiting.report("a", size)
        return waiting.is_due(now, senders_idle=False, all_hashed=True, stuck=stuck)

    assert not reported(1)
    assert reported(MOST // 4)
    assert reported(1, now=REPORT_SECONDS)
    assert reported(1, stuck=True)


def test_a_call_carries_no_more_than_the_protocol_allows():
    waiting = NextCall(MOST, now=0.0)
    for number in range(MAX_BATCH + 1):
        waiting.offer(f"o{number}", 0)
        waiting.report(f"r{number}", 0)
    assert waiting.is_due(0.0, senders_idle=False, **RUNNING)
    assert [len(digests) for digests in waiting.begin()] == [MAX_BATCH, MAX_BATCH]
    waiting.end(0.0)
    assert waiting.begin() == ([f"o{MAX_BATCH}"], [f"r{MAX_BATCH}"])
