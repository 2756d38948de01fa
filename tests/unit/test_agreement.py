"""All ranks do the same after the same step: threads as ranks, a dictionary as the job's store."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from holdfast.distributed.step_agreement import Ask, LoneAgreement, Outlook, RanksAgreement

WAIT_SECONDS = 60


class Store(dict):
    def set(self, key, value):
        self[key] = value.encode() if isinstance(value, str) else value

    def check(self, keys):
        return all(key in self for key in keys)

    def delete_key(self, key):
        return self.pop(key, None) is not None


class Job:
    """`heard[rank]`: the words that this rank was told. `never_due` is the policy of the clock."""

    def __init__(self, world_size, wants=lambda: False):
        self.world_size = world_size
        self.store = Store()
        self.heard = [[] for _ in range(world_size)]
        self.agreements = [
            RanksAgreement(
                SimpleNamespace(rank=rank, world_size=world_size, is_first=rank == 0, timeout_seconds=WAIT_SECONDS),
                self.store,
                wants if rank == 0 else lambda: False,
                self.heard[rank].append,
            )
            for rank in range(world_size)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for agreement in self.agreements:
            agreement.close()

    def wait_for(self, key):
        give_up = time.monotonic() + WAIT_SECONDS
        while key not in self.store and time.monotonic() < give_up:
            time.sleep(0.002)
        assert key in self.store

    def train(self, *, pauses, until=Ask.PREEMPT, together=False, start=0, stride=1, after=None):
        """Runs each rank until it is told `until`; what each was told, by step. `together`: no rank is ahead of another
        by more than the step it is in, as collectives make it."""
        told = [{} for _ in pauses]
        meet = threading.Barrier(len(pauses))
        given_up = time.monotonic() + WAIT_SECONDS

        def run(rank):
            step = start
            while until not in told[rank].values() and time.monotonic() < given_up:
                time.sleep(pauses[rank])
                if together:
                    meet.wait(WAIT_SECONDS)
                ask = self.agreements[rank].due(step)
                if ask is not None:
                    told[rank][step] = ask
                    if ask is Ask.SAVE:
                        self.agreements[rank].restart()
                step += stride
                if after is not None:
                    after(rank, step)

        threads = [threading.Thread(target=run, args=[rank]) for rank in range(len(pauses))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        return told


@pytest.mark.rule("local-save-flag")
@pytest.mark.parametrize("asking", [0, 2])
def test_whoever_asks_all_ranks_leave_after_the_same_step_and_know_why(asking):
    with Job(3) as job:
        once = threading.Event()

        def ask(rank, step):
            if rank == asking and step >= 40 and not once.is_set():
                once.set()
                job.agreements[asking].request(Ask.PREEMPT, "the node goes")

        told = job.train(pauses=[0.001, 0.0005, 0.002], after=ask)
        assert told[0] == told[1] == told[2]
        assert list(told[0].values()) == [Ask.PREEMPT]
        assert [agreement.outlook for agreement in job.agreements] == [Outlook.AGREED] * 3
        assert job.heard == [["the node goes"] if rank != asking else [] for rank in range(3)]


@pytest.mark.rule("local-save-flag")
def test_in_a_long_step_all_leave_after_that_one():
    """And the agreement is there before the step is over: threads answer that are not in it."""
    with Job(2) as job:
        told = {}

        def long_step(rank):
            job.agreements[rank].due(0)
            held.wait(WAIT_SECONDS)
            told[rank] = job.agreements[rank].due(1)

        held = threading.Event()
        threads = [threading.Thread(target=long_step, args=[rank]) for rank in range(2)]
        for thread in threads:
            thread.start()
        job.agreements[1].request(Ask.PREEMPT, "soon")
        give_up = time.monotonic() + WAIT_SECONDS
        while job.agreements[0].outlook is Outlook.OPEN and time.monotonic() < give_up:
            time.sleep(0.01)
        assert job.agreements[0].outlook is Outlook.AGREED
        held.set()
        for thread in threads:
            thread.join()
        assert told == {0: Ask.PREEMPT, 1: Ask.PREEMPT}


@pytest.mark.rule("local-save-flag")
@pytest.mark.parametrize("together", [True, False])
def test_a_request_to_leave_at_any_moment_of_a_save_leaves_no_rank_alone_in_it(together):
    """Saves are due all the time, so that the request comes before, in and after the rounds about them."""
    for moment in range(8):
        with Job(2, wants=lambda: True) as job:
            timer = threading.Timer(0.2 + 0.07 * moment, job.agreements[moment % 2].request, [Ask.PREEMPT, "now"])
            timer.start()
            told = job.train(pauses=[0.01, 0.004] if not together else [0.004, 0.004], together=together)
            timer.join()
            assert told[0] == told[1], moment
            assert list(told[0].values())[-1] is Ask.PREEMPT


def test_steps_whose_numbers_jump_or_go_back_are_counted_all_the_same():
    with Job(2) as job:
        job.agreements[0].request(Ask.PREEMPT, "now")
        told = job.train(pauses=[0.002, 0.003], start=5000, stride=-7)
        assert told[0] == told[1] != {}


def test_any_rank_can_ask_for_a_save():
    with Job(2) as job:
        job.agreements[1].request(Ask.SAVE)
        told = job.train(pauses=[0.003, 0.002], until=Ask.SAVE)
        assert told[0] == told[1] != {}
        job.agreements[0].request(Ask.SAVE)
        again = job.train(pauses=[0.003, 0.002], until=Ask.SAVE, start=10_000)
        assert again[0] == again[1] != {}


def test_what_all_ranks_have_read_of_a_save_does_not_stay_in_the_store(monkeypatch):
    monkeypatch.setattr("holdfast.distributed.step_agreement.POLL_SECONDS", 0.005)
    monkeypatch.setattr("holdfast.distributed.step_agreement.LEAD_SECONDS", 0.02)
    with Job(3, wants=lambda: True) as job:

        def leave_in_round_6(rank, step):
            if rank == 0 and "6/call" in job.store:
                job.agreements[0].request(Ask.PREEMPT)
            elif rank == 1:
                job.agreements[1].request(Ask.SAVE)

        told = job.train(pauses=[0.001] * 3, together=True, after=leave_in_round_6)
        assert told[0] == told[1] == told[2]
        # All had answered in round 5 when round 6 was called for.
        assert not {key.partition("/")[0] for key in job.store} & set("01234")


@pytest.mark.rule("local-save-flag")
def test_a_save_that_a_rank_has_not_come_to_stands_though_the_next_one_is_called_for(monkeypatch):
    monkeypatch.setattr("holdfast.distributed.step_agreement.POLL_SECONDS", 0.005)
    with Job(2) as job:
        fast, slow = job.agreements
        assert [fast.due(0), slow.due(0)] == [None, None]
        fast.request(Ask.SAVE)
        job.wait_for("0/verdict")
        step = 1
        while (told := fast.due(step)) is None:
            step += 1
        assert told is Ask.SAVE
        fast.restart()
        fast.request(Ask.SAVE)
        job.wait_for("1/call")
        time.sleep(0.1)  # the slow rank's thread has read it
        assert [slow.due(at) for at in range(1, step + 1)] == [None] * (step - 1) + [Ask.SAVE]
        job.wait_for("1/ack/1")


def test_a_rank_that_is_at_its_end_is_waited_for_by_nobody():
    for leaver, asking in ((1, 0), (0, 1)):
        with Job(2) as job:
            job.agreements[leaver].close()
            job.agreements[asking].request(Ask.PREEMPT, "now")
            give_up = time.monotonic() + WAIT_SECONDS
            while job.agreements[asking].outlook is Outlook.OPEN and time.monotonic() < give_up:
                time.sleep(0.01)
            assert job.agreements[asking].outlook is Outlook.OVER
            assert job.agreements[asking].due(1) is None


def test_a_job_whose_store_is_gone_does_not_wait_for_answers():
    with Job(2) as job:
        cut_off = job.agreements[1]
        cut_off._store = SimpleNamespace(check=_refuses)
        cut_off.request(Ask.PREEMPT, "now")
        cut_off._thread.join(WAIT_SECONDS)
        assert cut_off.outlook is Outlook.BROKEN


def _refuses(_keys):
    raise RuntimeError("connection reset by peer")


def test_a_lone_process_leaves_after_the_step_that_it_is_in():
    agreement = LoneAgreement(lambda: True)
    assert agreement.due(0) is Ask.SAVE
    agreement.request(Ask.SAVE)
    agreement.request(Ask.PREEMPT)
    agreement.restart()
    assert agreement.due(1) is agreement.due(2) is Ask.PREEMPT
