"""The job is told to leave: what is saved, what is told, and how the process ends. One process, signals and all."""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from tests.support.training import Job

import holdfast
from holdfast.distributed.ranks import Ranks
from holdfast.distributed.step_agreement import Outlook
from holdfast.preemption import emergency
from holdfast.preemption.notice import Notice
from holdfast.preemption.watch import PreemptionWatch
from holdfast.save.job import SaveHandle
from holdfast.settings import TrainerSettings
from holdfast_client.chunks import uploader
from holdfast_client.transport import check_stop
from holdfast_protocol.states import AttemptOutcome, CheckpointKind, CheckpointState

WAIT_SECONDS = 60


def checkpoints(service, run):
    return sorted(service.client.checkpoints.all(*run.split("/")), key=lambda view: view.created_at)


def attempt(service, run):
    return service.client.attempts.list(*run.split("/")).items[-1]


def preempted(run, train, **options):
    """What `train(ckpt, job)` was ended by."""
    job = Job(seed=random.randrange(2**31))

    def launch():
        with holdfast.Checkpointer(run, **options) as ckpt:
            ckpt.restore(job.state)
            train(ckpt, job)

    with pytest.raises(holdfast.Preempted) as told:
        launch()
    return told.value


def until(true):
    given_up = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < given_up
        time.sleep(0.002)


def until_told_to_leave(ckpt, job, in_step):
    for step in range(10_000):
        in_step(step)
        job.step(step)
        ckpt.step(step, job.state, metrics={"loss": 0.5})
        time.sleep(0.002)
    raise AssertionError("it was told to leave")


@pytest.mark.rule("sigterm-thread")
@pytest.mark.parametrize(("number", "deadline_seconds"), [(signal.SIGTERM, 27.0), (signal.SIGUSR1, None)])
def test_a_signal_in_a_step_saves_that_step_and_the_next_launch_goes_on_after_it(
    run, service, monkeypatch, number, deadline_seconds
):
    monkeypatch.delenv("HOLDFAST_PREEMPTION_GRACE_SECONDS")  # the default
    let_no_deadline_come(monkeypatch)

    def train(ckpt, job):
        def in_step_5(step):
            if step == 5:
                os.kill(os.getpid(), number)
                until(lambda: ckpt.parts.preemption.agreement.outlook is Outlook.AGREED)

        until_told_to_leave(ckpt, job, in_step_5)

    told = preempted(run, train, save=holdfast.Every(steps=1000))
    assert told.saved_step == 5
    assert "step 5 is committed" in str(told)
    [view] = checkpoints(service, run)
    assert (view.step, view.kind, view.state) == (5, CheckpointKind.EMERGENCY, CheckpointState.COMMITTED)
    ended = attempt(service, run)
    assert ended.outcome == AttemptOutcome.PREEMPTED
    assert (ended.notice.source, ended.notice.deadline_seconds) == (number.name, deadline_seconds)
    assert TrainerSettings(preemption_grace_seconds=117).grace_seconds_after(number) == 117
    assert "step 5 is committed" in ended.outcome_detail
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(Job().state) == 6


@pytest.mark.rule("finish-or-supersede")
def test_after_a_rollback_a_step_is_saved_though_the_attempt_that_was_left_has_one_of_that_number(run, service):
    def train(ckpt, job):
        for step, loss in [(0, 1.0), (1, float("nan"))]:
            job.step(step)
            ckpt.save(step, job.state, metrics={"loss": loss}).committed.result(WAIT_SECONDS)
        assert ckpt.rollback(job.state) == 1
        assert ckpt.stats.last_committed_step == 0
        ckpt.parts.preemption.give_notice(Notice("SIGTERM", "a signal", 60.0))
        job.step(1)
        ckpt.step(1, job.state)

    assert preempted(run, train).saved_step == 1
    assert service.client.restores.restore_point(*run.split("/")).restore_point.step == 1
    assert [(view.step, view.attempt) for view in checkpoints(service, run)] == [(0, 1), (1, 1), (1, 2)]


def test_who_goes_on_after_being_told_is_told_again_and_saves_nothing_twice(run, service):
    job = Job(seed=random.randrange(2**31))
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state)
        ckpt.parts.preemption.give_notice(Notice("aws", "spot interruption", 60.0))
        for step in range(2):
            with pytest.raises(holdfast.Preempted, match="spot interruption"):
                ckpt.step(step, job.state)
    assert [view.step for view in checkpoints(service, run)] == [0]


def test_who_is_told_has_the_checkpoint_though_its_handle_hears_of_the_commit_last(run, service, monkeypatch):
    asked, committed, mark = threading.Event(), emergency._committed, SaveHandle.mark_committed
    monkeypatch.setattr(emergency, "_HEARS_WITHIN_SECONDS", WAIT_SECONDS)
    monkeypatch.setattr(emergency, "_committed", lambda *args: (asked.set(), committed(*args))[1])
    monkeypatch.setattr(SaveHandle, "mark_committed", lambda *args: (asked.wait(WAIT_SECONDS), mark(*args)))

    def train(ckpt, job):
        ckpt.parts.preemption.give_notice(Notice("aws", "spot interruption", 60.0))
        ckpt.step(0, job.state)

    told = preempted(run, train)
    assert [view.id for view in checkpoints(service, run)] == [told.checkpoint.id]


def test_a_notice_while_the_last_save_drains_lets_it_finish(run, service, monkeypatch):
    job, told = Job(seed=random.randrange(2**31)), threading.Event()
    put = uploader.put_chunk

    def slowly(*arguments, **named):
        os.kill(os.getpid(), signal.SIGTERM)
        told.wait(0.5)
        return put(*arguments, **named)

    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state)
        monkeypatch.setattr(uploader, "put_chunk", slowly)
        ckpt.save(0, job.state)
    assert attempt(service, run).outcome == AttemptOutcome.FINISHED
    assert [view.state for view in checkpoints(service, run)] == [CheckpointState.COMMITTED]


class Store:
    """Takes chunks as fast as ever, or not at all while `stalls` is set."""

    def __init__(self, monkeypatch):
        self.stalls = threading.Event()
        self.stalled = threading.Event()
        put = uploader.put_chunk

        def put_or_stall(*arguments, stop, **named):
            while self.stalls.is_set():
                self.stalled.set()
                check_stop(stop)
                time.sleep(0.01)
            return put(*arguments, stop=stop, **named)

        monkeypatch.setattr(uploader, "put_chunk", put_or_stall)


@pytest.mark.rule("finish-or-supersede")
def test_a_save_that_cannot_finish_in_time_makes_room_for_the_newest_state(run, service, monkeypatch, caplog):
    store, old = Store(monkeypatch), []

    def train(ckpt, job):
        store.stalls.set()
        old.append(ckpt.save(0, job.state))
        assert store.stalled.wait(WAIT_SECONDS)
        # As if saves took 100 s: two of them do not fit into the time that is left, and one does.
        ckpt.parts.pipeline.rates.committed(ckpt.parts.pipeline.in_flight[0].total_bytes, 100.0)
        supersede = ckpt.parts.pipeline.supersede
        monkeypatch.setattr(ckpt.parts.pipeline, "supersede", lambda why: (supersede(why), store.stalls.clear()))
        ckpt.parts.preemption.give_notice(Notice("SIGTERM", "a signal", 200.0))
        job.step(1)
        ckpt.step(1, job.state)

    assert "step 1 is committed" in str(preempted(run, train))
    assert isinstance(old[0].committed.exception(WAIT_SECONDS), holdfast.errors.SaveSuperseded)
    assert [(view.step, view.state) for view in checkpoints(service, run)] == [
        (0, CheckpointState.ABORTED),
        (1, CheckpointState.COMMITTED),
    ]
    assert "There was no time left" in checkpoints(service, run)[0].abort_reason
    assert "the save in flight is given up" in caplog.text


@pytest.mark.rule("finish-or-supersede")
def test_a_save_in_flight_that_alone_can_finish_is_finished(run, service, monkeypatch):
    store = Store(monkeypatch)

    def train(ckpt, job):
        store.stalls.set()
        ckpt.save(0, job.state)
        assert store.stalled.wait(WAIT_SECONDS)
        ckpt.parts.pipeline.rates.committed(ckpt.parts.pipeline.in_flight[0].total_bytes, 600.0)
        ckpt.parts.preemption.give_notice(Notice("SIGTERM", "a signal", 60.0))
        wait_idle = ckpt.parts.pipeline.wait_idle  # behind the choice
        monkeypatch.setattr(ckpt.parts.pipeline, "wait_idle", lambda left: (store.stalls.clear(), wait_idle(left))[1])
        job.step(1)
        ckpt.step(1, job.state)

    told = str(preempted(run, train))
    assert "could not be" in told
    assert "Committed is step 0" in told
    assert [(view.step, view.state) for view in checkpoints(service, run)] == [(0, CheckpointState.COMMITTED)]


class Exit:
    """In place of the end of the process."""

    def __init__(self, monkeypatch):
        self.code = None
        monkeypatch.setattr("holdfast.preemption.watch.os._exit", self)

    def __call__(self, code):
        self.code = code


def let_no_deadline_come(monkeypatch):
    """However busy the machine is: at a real deadline the process ends, which is the one of all tests."""
    monkeypatch.setattr("holdfast.preemption.watch.time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(PreemptionWatch, "wait_seconds", lambda _: WAIT_SECONDS)


def let_the_deadline_come(monkeypatch):
    now = time.monotonic
    monkeypatch.setattr("holdfast.preemption.watch.time", SimpleNamespace(monotonic=lambda: now() + 3600))


@pytest.mark.rule("finish-or-supersede")
def test_where_no_step_ends_in_time_what_was_staged_last_is_saved_and_the_process_ends(run, service, monkeypatch):
    job, ended = Job(seed=random.randrange(2**31)), Exit(monkeypatch)
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=1000), stage_every=2) as ckpt:
        ckpt.restore(job.state)
        for step in range(5):
            job.step(step)
            ckpt.step(step, job.state, metrics={"loss": step})
        assert checkpoints(service, run) == []
        ckpt.parts.standby.look(math.inf, lambda: True)  # as after a notice without a deadline
        ckpt.parts.pipeline.rates.committed(1, 600.0)  # saves take so long that none waits for a step
        ckpt.parts.preemption.give_notice(Notice("SIGTERM", "a signal", 600.0))
        until(lambda: ckpt.stats.committed == 1)
        let_the_deadline_come(monkeypatch)
        until(lambda: ended.code is not None)
    assert ended.code == 75
    [view] = checkpoints(service, run)
    assert (view.step, view.kind, view.state) == (3, CheckpointKind.EMERGENCY, CheckpointState.COMMITTED)
    assert view.metrics["loss"].value == 3
    assert attempt(service, run).outcome == AttemptOutcome.PREEMPTED
    fresh = Job()
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(fresh.state) == 4
    assert fresh.state["notes"] == {"seen": [0, 1, 2, 3]}


def test_what_is_staged_disturbs_no_save_in_flight_and_older_than_it_is_never_sent(run, service, monkeypatch):
    store, job, ended = Store(monkeypatch), Job(seed=random.randrange(2**31)), Exit(monkeypatch)
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=1000), stage_every=1) as ckpt:
        ckpt.restore(job.state)
        ckpt.step(0, job.state)
        store.stalls.set()
        handle = ckpt.save(1, job.state)
        assert store.stalled.wait(WAIT_SECONDS)
        ckpt.parts.preemption.give_notice(Notice("aws", "spot interruption", 600.0))
        ckpt.parts.standby.look(0.0, lambda: True)  # the last moment comes while the save is in flight
        assert [each.step for each in ckpt.parts.pipeline.in_flight] == [1]
        store.stalls.clear()
        handle.committed.result(WAIT_SECONDS)
        ckpt.parts.standby.look(0.0, lambda: True)  # or after it
        assert ckpt.parts.pipeline.in_flight == []
        let_the_deadline_come(monkeypatch)
        until(lambda: ended.code is not None)
    assert [(view.step, view.state) for view in checkpoints(service, run)] == [(1, CheckpointState.COMMITTED)]


class EndedStore:
    """The job's store, once the process that held it has left."""

    def set(self, key, value):
        raise RuntimeError("Connection was likely closed")


def test_a_staged_state_that_no_rank_can_be_told_of_keeps_the_process_from_no_end(run, service, monkeypatch):
    job, ended = Job(seed=random.randrange(2**31)), Exit(monkeypatch)
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=1000), stage_every=1) as ckpt:
        ckpt.restore(job.state)
        ckpt.step(0, job.state)
        ckpt.parts.standby._store = EndedStore()
        ckpt.parts.preemption.give_notice(Notice("SIGTERM", "a signal", 3.0))
        until(lambda: ended.code is not None)
    assert ended.code == 75
    assert checkpoints(service, run) == []


class ToldStore:
    """The job's store, where rank 0 has said which step is uploaded."""

    def check(self, keys):
        return True

    def get(self, key):
        return b"0"


def test_a_staged_state_that_rank_0_uploads_is_not_dropped_for_a_newer_one_before_this_ranks_watch_looks(run, service):
    job = Job(seed=random.randrange(2**31))
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=1000), stage_every=1) as ckpt:
        ckpt.restore(job.state)
        ckpt.step(0, job.state)
        ckpt.parts.standby._store = ToldStore()
        ckpt.step(1, job.state)
    assert [(view.step, view.state) for view in checkpoints(service, run)] == [(0, CheckpointState.COMMITTED)]


def test_a_log_handler_that_raises_costs_no_notice_and_no_emergency_save(run):
    raised = []

    def raising(record):
        if record.getMessage().startswith(("this job is told to leave", "leaving after step")):
            raised.append(record)
            raise BrokenPipeError("the script's log is gone")
        return True

    def train(ckpt, job):
        def in_step_3(step):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                until(lambda: ckpt.parts.preemption.agreement.outlook is Outlook.AGREED)

        until_told_to_leave(ckpt, job, in_step_3)

    logger = logging.getLogger("holdfast")
    logger.addFilter(raising)
    try:
        told = preempted(run, train, save=holdfast.Every(steps=1000))
    finally:
        logger.removeFilter(raising)
    assert len(raised) == 2
    assert told.saved_step == 3


def test_before_there_is_anything_to_save_sigterm_ends_the_process_as_ever(run, monkeypatch):
    ended = Exit(monkeypatch)
    ckpt = holdfast.Checkpointer(run)
    ckpt.parts.preemption.give_notice(Notice("SIGTERM", "a signal", 27.0))
    until(lambda: ended.code is not None)
    ckpt.close()
    assert ended.code == 143


@pytest.mark.rule("sigterm-thread")
def test_a_process_that_got_no_turn_for_long_does_not_take_the_others_for_dead(monkeypatch):
    """It counts how often it has looked for their answer, and not how much time has passed."""
    ended, looks = Exit(monkeypatch), []
    settings = TrainerSettings(preemption_signals="", preemption_cloud="none", preemption_agree_seconds=20)
    watch = PreemptionWatch(
        Ranks(timeout_seconds=1), settings, wants=lambda: False, has_work=lambda: True, end=lambda *_: None
    )
    watch.agreement = SimpleNamespace(outlook=Outlook.OPEN, request=lambda *_: None, close=lambda **_: None)
    watch.standby = SimpleNamespace(look=lambda *_: looks.append(True))
    watch.give_notice(Notice("SIGTERM", "a signal", None))
    let_the_deadline_come(monkeypatch)
    before = len(looks)
    until(lambda: ended.code is not None or len(looks) >= before + 2)
    watch.close(in_order=True)
    assert ended.code is None


@pytest.mark.parametrize("wrong", [{"stage_every": 0}, {"stage_every": 5, "host_memory": 2**30}])
def test_cover_that_cannot_be_meant_is_refused_before_there_are_threads(run, wrong):
    before = threading.enumerate()
    with pytest.raises(holdfast.errors.ConfigurationError, match="stage_every"):
        holdfast.Checkpointer(run, overlap=True, **wrong)
    assert not [each for each in threading.enumerate() if each not in before and each.name.startswith("holdfast-")]
