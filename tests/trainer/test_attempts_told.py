"""What a job tells of its attempt: how far it came, and how it ended, by whoever met the error first."""

from __future__ import annotations

import socket
import sys
import threading
import time

import pytest
import torch
from gloo import run_ranks
from tests.support.training import Job

import holdfast
from holdfast_client.client import Client
from holdfast_protocol.attempts import AttemptView
from holdfast_protocol.states import AttemptOutcome


class Boom(Exception):
    pass


def attempt_of(client: Client, run: str, number: int = 1) -> AttemptView:
    return client.attempts.get(*run.split("/"), number)


def test_a_job_tells_how_far_it_came_and_its_error_before_its_save_is_over(run, service, monkeypatch):
    seen: list[AttemptView] = []
    job = Job()
    ckpt = holdfast.Checkpointer(run, save=holdfast.Every(steps=2))
    drains = ckpt.parts.pipeline.wait_idle

    def looks_while_draining(timeout_seconds):
        seen.append(attempt_of(service.client, run))
        return drains(timeout_seconds)

    def crashes():
        with ckpt:
            start = ckpt.restore(job.state)
            for step in range(start, 5):
                job.step(step)
                handle = ckpt.step(step, job.state)
                if handle is not None:
                    handle.committed.result(timeout=60)
            monkeypatch.setattr(ckpt.parts.pipeline, "wait_idle", looks_while_draining)
            raise Boom("GET https://user:pass@store.example/chunk?X-Amz-Signature=abc failed")

    with pytest.raises(Boom):
        crashes()
    view = attempt_of(service.client, run)
    assert seen[0].outcome is view.outcome is AttemptOutcome.FAILED, "told before anything was waited for"
    assert (view.error_type, view.error_rank) == ("test_attempts_told.Boom", 0)
    assert view.outcome_detail == "Boom: GET https://***@store.example/chunk?*** failed"
    assert (view.first_step, view.last_step, view.steps_run, view.saves_begun) == (0, 4, 5, 2)
    assert 0 < view.save_blocked_seconds < view.save_blocked_seconds + view.restore_seconds < 60
    assert view.opened_at <= view.first_step_at <= view.progressed_at <= view.ended_at
    resumed = Job()
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=2)) as ckpt:
        for step in range(ckpt.restore(resumed.state), 7):
            resumed.step(step)
            ckpt.step(step, resumed.state)
    goodput = service.client.insights.goodput(*run.split("/"))
    told = [(one.resumed_from_step, one.steps_run, one.steps_lost) for one in goodput.attempts]
    assert told == [(None, 5, 1), (3, 3, 0)]
    assert (goodput.steps_kept, goodput.steps_lost) == (7, 1)


def dies_on_rank_1(rank: int, run: str) -> None:
    job = Job(rank)
    try:
        with holdfast.Checkpointer(run, save=holdfast.Every(steps=100)) as ckpt:
            ckpt.restore(job.state)
            for step in range(3):
                job.step(step)
                ckpt.step(step, job.state)
            if rank == 1:
                raise Boom("only here")
            while attempt_of(ckpt.parts.client, run).outcome is None:
                time.sleep(0.02)
            raise ConnectionError("a peer is gone")  # as a collective raises, which waits for rank 1
    except (Boom, ConnectionError):
        return


def test_the_rank_that_met_the_error_is_named_and_not_the_one_that_met_its_end(run, service):
    run_ranks(dies_on_rank_1, 2, run)
    view = attempt_of(service.client, run)
    assert (view.outcome, view.error_type, view.error_rank) == (AttemptOutcome.FAILED, "test_attempts_told.Boom", 1)
    assert (view.outcome_detail, view.last_step, view.steps_run) == ("Boom: only here", 2, 3)


def test_a_service_that_says_nothing_keeps_no_rank_from_ending(run, service, monkeypatch):
    """Its port takes connections and never answers: the job is not held up, and tells once more at its end."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        job = Job()
        ckpt = holdfast.Checkpointer(run)
        ckpt.restore(job.state)
        heart = ckpt.parts.session._heartbeat
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = ckpt.parts.client.settings.model_copy(update={"url": url, "timeout_seconds": 60.0})
        with Client(settings) as nobody:
            monkeypatch.setattr(heart, "_client", nobody)
            began = time.monotonic()
            heart.crashed(Boom("quietly"))
            assert time.monotonic() - began < 30
    assert attempt_of(service.client, run).outcome is None, "nobody has heard"
    monkeypatch.setattr(heart, "_client", ckpt.parts.session.brief_client)
    ckpt.close()
    view = attempt_of(service.client, run)
    assert (view.outcome_detail, view.error_rank) == ("Boom: quietly", 0)


def test_an_attempt_ends_by_its_error_also_when_no_thread_can_be_started_any_more(run, service, monkeypatch):
    """As in a program without a `with`, from Python 3.12 on: its handlers at exit can start none."""
    state = {"big": {"t": torch.randn(2_000_000)}}
    ckpt = holdfast.Checkpointer(run)
    ckpt.restore(state)
    handle = ckpt.save(0, state)
    starts = threading.Thread.start

    def start(thread):
        if thread.name == "holdfast-crash":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        starts(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(sys, "last_value", Boom("out of memory"), raising=False)
    ckpt._close_at_exit()
    assert handle.committed.result(timeout=0).step == 0
    view = attempt_of(service.client, run)
    assert (view.outcome, view.outcome_detail) == (AttemptOutcome.FAILED, "Boom: out of memory")
    assert view.error_type == "test_attempts_told.Boom"


def test_a_job_tells_what_it_trains_at_each_attempt(run, service) -> None:
    for rate in (0.1, 0.2):
        with holdfast.Checkpointer(run, config={"optimizer": {"lr": rate}, "wandb_token": "t"}) as ckpt:
            ckpt.restore(Job().state)
    told = service.client.attempts.config(*run.split("/"), 2)
    assert told.config == {"optimizer": {"lr": 0.2}, "wandb_token": "(left out)"}
    assert [(each.path, each.before, each.after) for each in told.differences] == [("optimizer.lr", 0.1, 0.2)]
