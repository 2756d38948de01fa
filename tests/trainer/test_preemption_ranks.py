"""One rank is told to leave: all ranks leave after the same step, wherever they are when it is told."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from tests.support.training import Job

import holdfast
from holdfast.distributed.step_agreement import Outlook
from holdfast.settings import TrainerSettings
from holdfast_client.chunks import uploader
from holdfast_protocol.states import AttemptOutcome, CheckpointKind, CheckpointState

WAIT_SECONDS = 60


def until(true):
    given_up = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < given_up
        time.sleep(0.005)


def told_while_it_evaluates(ckpt, rank, step):
    if step == 4:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: ckpt.parts.preemption.agreement.outlook is Outlook.AGREED)


def told_in_a_collective(ckpt, rank, step):
    """Rank 1 is told while it waits for rank 0, which does not come before both have agreed."""
    if step == 3 and rank == 1:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGTERM]).start()
    if step == 3 and rank == 0:
        until(lambda: ckpt.parts.preemption.agreement.outlook is Outlook.AGREED)
    dist.all_reduce(torch.zeros(1))


def told_in_a_save(ckpt, rank, step):
    if step == 1:
        put = uploader.put_chunk

        def slowly(*arguments, **named):
            until(lambda: ckpt.parts.preemption.agreement.outlook is Outlook.AGREED)
            return put(*arguments, **named)

        uploader.put_chunk = slowly
    if step == 3:
        uploading = ckpt.parts.pipeline.in_flight
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: ckpt.parts.preemption.agreement.outlook is Outlook.AGREED)
        assert [job.step for job in uploading] == [2]


def leave_thrice(rank, runs, seed):
    left = []
    for run, told in zip(runs, (told_in_a_collective, told_while_it_evaluates, told_in_a_save), strict=True):
        job = Job(rank, "ddp", seed=seed + len(left))
        save = holdfast.Every(steps=3 if told is told_in_a_save else 1000)
        try:
            with holdfast.Checkpointer(run, create=True, save=save) as ckpt:
                ckpt.restore(job.state)
                for step in range(10_000):
                    job.step(step)
                    told(ckpt, rank, step)
                    ckpt.step(step, job.state, metrics={"loss": 1.0})
        except holdfast.Preempted as error:
            left.append((error.saved_step, str(error)))
    return left


@pytest.mark.rule("sigterm-thread")
@pytest.mark.rule("local-save-flag")
def test_the_signal_of_one_rank_makes_all_leave_after_the_step_that_it_came_in(run, service):
    runs = [run, f"{run}-evaluation", f"{run}-save"]
    first, second = run_ranks(leave_thrice, 2, runs, random.randrange(2**30))
    assert [step for step, _ in first] == [step for step, _ in second] == [3, 4, 3]
    assert all("SIGTERM" in text for _, text in first + second)
    for name, step in zip(runs, [3, 4, 3], strict=True):
        newest = max(service.client.checkpoints.all(*name.split("/")), key=lambda view: view.step)
        assert (newest.step, newest.kind, newest.state) == (step, CheckpointKind.EMERGENCY, CheckpointState.COMMITTED)
        [attempt] = service.client.attempts.list(*name.split("/")).items
        assert attempt.outcome == AttemptOutcome.PREEMPTED
        assert attempt.notice.source == "SIGTERM"


def lose_a_peer(rank, run):
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True, settings=TrainerSettings(preemption_agree_seconds=0.5)) as ckpt:
        ckpt.restore(job.state)
        dist.barrier()
        if rank == 1:
            os._exit(3)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * WAIT_SECONDS)


@pytest.mark.rule("sigterm-thread")
def test_survivors_of_a_crash_that_their_launcher_ends_do_not_wait_for_the_dead(run, service):
    with pytest.raises(AssertionError, match="rank 0: died with exit code 143"):
        run_ranks(lose_a_peer, 2, run, peers_seconds=WAIT_SECONDS)
    [attempt] = service.client.attempts.list(*run.split("/")).items
    assert attempt.outcome == AttemptOutcome.FAILED
    assert "one of them has ended" in attempt.outcome_detail
