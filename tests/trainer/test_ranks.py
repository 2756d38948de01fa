"""The agreements between ranks, on real gloo processes: nobody waits for a rank that failed, nobody declines alone."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from tests.support.training import Job, train

import holdfast
from holdfast.distributed import ranks as module
from holdfast.distributed.ranks import Ballot, Ranks
from holdfast.errors import RankLost
from holdfast.save import saver
from holdfast_client.errors import ChunkLost

DIGEST = "ab" * 32


def caught(call):
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


def vote(rank, ballots):
    ranks = Ranks(timeout_seconds=60)
    return [caught(lambda ballot=ballot: ranks.vote(ballot)) for ballot in ballots[rank]]


@pytest.mark.rule("one-vote-per-step")
def test_one_busy_rank_makes_all_ranks_decline():
    idle, busy = Ballot(5, False, False, DIGEST), Ballot(5, True, False, DIGEST)
    for verdicts in run_ranks(vote, 3, [[idle], [busy], [idle]]):
        assert [(verdict.busy, verdict.failed, verdict.same_layout) for verdict in verdicts] == [(True, False, True)]


@pytest.mark.rule("layout-vote")
def test_a_rank_with_another_layout_makes_all_ranks_plan_again():
    same, other, unknown = (Ballot(5, False, False, digest) for digest in (DIGEST, "cd" * 32, None))
    for verdicts in run_ranks(vote, 2, [[same, same, same], [same, other, unknown]]):
        assert [verdict.same_layout for verdict in verdicts] == [True, False, False]


def test_ranks_at_other_steps_raise_on_all_ranks():
    results = run_ranks(vote, 2, [[Ballot(5, False, False, None)], [Ballot(6, False, False, None)]])
    assert [result[0] for [result] in results] == ["RanksDisagree"] * 2


def vote_under_another_default_device(rank):
    ranks = Ranks(timeout_seconds=60)
    with torch.device("meta"):
        return ranks.vote(Ballot(5, rank == 1, False, DIGEST))


def test_ranks_vote_in_host_memory_whatever_the_scripts_default_device_is():
    verdicts = run_ranks(vote_under_another_default_device, 2)
    assert [(verdict.busy, verdict.same_layout) for verdict in verdicts] == [(True, True)] * 2


@pytest.mark.parametrize(("seconds", "within"), [(1800, ""), (0, " within 0 s")])
def test_seconds_are_told_only_where_time_ran_out(seconds, within):
    def closed():
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RankLost, match=rf"could not reach each other{within} \(Connection closed by peer\)"):
        Ranks(timeout_seconds=seconds)._collective(closed)


def agree(rank):
    ranks = Ranks(timeout_seconds=60)

    def fails_on_1():
        if rank == 1:
            raise ChunkLost("ab" * 32, "it is gone", ["ck_1"])
        return rank

    def fails_on_0():
        raise KeyError("only rank 0 comes here")

    def fails_differently():
        if rank > 0:
            raise (KeyError if rank == 1 else ValueError)("each rank has met something else")

    together = caught(lambda: ranks.together(fails_on_1))
    return [
        caught(lambda: ranks.together(fails_differently))[0],
        together[0],
        "it is gone" in together[1],
        caught(lambda: ranks.from_first(fails_on_0))[0],
        ranks.from_first(lambda: "shared"),
        ranks.together(lambda: rank * 2),
        ranks.host_leader,
    ]


@pytest.mark.rule("one-vote-per-step")
def test_what_one_rank_raises_all_ranks_raise():
    for result in run_ranks(agree, 3):
        assert result == ["KeyError", "ChunkLost", True, "KeyError", "shared", [0, 2, 4], 0]


def look_around(rank):
    module.socket.gethostname = lambda: "trainer"
    module._boot_id = lambda: f"machine {rank // 2}"
    ranks = Ranks(timeout_seconds=60)
    return ranks.host_ranks, ranks.host_leader, ranks.host_leaders, ranks.hosts


def test_machines_of_one_name_are_told_apart():
    """Else one rank alone would ask its cloud for notices, and the other machines' would go unseen."""
    results = run_ranks(look_around, 3)
    assert [result[:2] for result in results] == [((0, 1), 0), ((0, 1), 0), ((2,), 2)]
    assert {result[2:] for result in results} == {((0, 0, 2), frozenset({"trainer"}))}


def share(rank, ranks_of_a_host, swarming):
    module.socket.gethostname = lambda: f"host {rank // ranks_of_a_host}"
    return Ranks(timeout_seconds=60, swarms=rank in swarming).some_share


@pytest.mark.parametrize(
    ("count", "ranks_of_a_host", "swarming", "found"),
    [(1, 1, [0], False), (2, 1, [], False), (2, 1, [1], True), (3, 2, [], True), (2, 2, [], True)],
)
def test_ranks_share_on_a_host_or_if_any_swarms_and_all_know_it(count, ranks_of_a_host, swarming, found):
    assert run_ranks(share, count, ranks_of_a_host, swarming) == [found] * count


def save_odd_objects(rank, run):
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True) as ckpt:
        ckpt.restore(job.state)
        odd = {**job.state, "odd": {"lock": threading.Lock() if rank == 1 else 1}}
        refused = caught(lambda: ckpt.save(0, odd))
        began = time.monotonic()
        fine = ckpt.save(1, job.state).committed.result(timeout=60).step
        return refused[0], "odd" in refused[1] and "lock" in refused[1], fine, time.monotonic() - began < 60


@pytest.mark.rule("refuse-inexact")
def test_an_object_that_one_rank_cannot_save_is_refused_by_key_on_all_ranks_without_a_deadlock(run):
    assert run_ranks(save_odd_objects, 2, run) == [("UnsupportedStateError", True, 1, True)] * 2


def save_without_others(rank, run):
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True) as ckpt:
        return caught(lambda: ckpt.restore(job.state))[0]


@pytest.mark.rule("one-vote-per-step")
def test_an_absent_service_raises_on_all_ranks(monkeypatch):
    monkeypatch.setenv("HOLDFAST_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOLDFAST_TOKEN", "hold_a_b")
    monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "1")
    assert run_ranks(save_without_others, 2, "tests/absent") == ["ServiceUnavailable"] * 2


def fall_behind(rank, run):
    """Rank 1's upload is held back while rank 0's is long over."""
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True, save=holdfast.Every(steps=1)) as ckpt:
        ckpt.restore(job.state)
        first = ckpt.step(0, job.state)
        first.committed.result(timeout=60)
        gate = threading.Event()
        if rank == 1:
            write = ckpt.parts.pipeline._write
            ckpt.parts.pipeline._write = lambda writer, job: (gate.wait(60), write(writer, job))[1]
        slow = ckpt.step(1, job.state)
        declined = ckpt.step(2, job.state)
        dist.barrier()
        gate.set()
        return (
            type(declined.committed.exception(timeout=60)).__name__,
            slow.committed.result(timeout=60).step,
            ckpt.stats.declined,
        )


@pytest.mark.rule("one-vote-per-step")
def test_a_rank_that_is_still_uploading_makes_all_ranks_decline_the_next_save(run):
    assert run_ranks(fall_behind, 2, run) == [("SaveDeclined", 1, 1)] * 2


def raise_beside_a_busy_rank(rank, run, folder):
    """Rank 1's disk is slow, and rank 0 is free again."""
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True, save=holdfast.Every(steps=1), local=folder) as ckpt:
        ckpt.restore(job.state)
        disk, kept = threading.Event(), ckpt.parts.pipeline._kept
        if rank == 1:
            ckpt.parts.pipeline._kept = lambda *arguments: (disk.wait(60), kept(*arguments))[1]
        slow = ckpt.step(0, job.state)
        if rank == 0:
            slow.local.result(timeout=60)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(saver, "capture", None)
            declined = ckpt.step(1, job.state)
        odd = {"odd": {"lock": threading.Lock()}} if rank == 0 else {}
        refused = caught(lambda: ckpt.step(2, job.state | odd))
        disk.set()
        return type(declined.committed.exception(timeout=60)).__name__, refused[0], slow.committed.result(60).step


@pytest.mark.rule("one-vote-per-step")
def test_a_busy_rank_captures_nothing_and_raises_what_another_rank_raises(run, tmp_path):
    ended = run_ranks(raise_beside_a_busy_rank, 2, run, tmp_path / "nvme")
    assert ended == [("SaveDeclined", "UnsupportedStateError", 0)] * 2


def begin_when_aborted(ckpt):
    """The next begin comes only once the other rank has failed, and has had the checkpoint aborted. Until then this
    rank does not hear of it."""
    begin, watch = ckpt.parts.session.shard_writer, ckpt.parts.pipeline._watch
    given_up, watch.given_up = watch.given_up, lambda number: None

    def late(*arguments, **more):
        ckpt.parts.session.shard_writer, watch.given_up = begin, given_up
        while not any(view.state == "aborted" for view in ckpt.parts.client.checkpoints.all(*ckpt.run.split("/"))):
            time.sleep(0.05)
        return begin(*arguments, **more)

    ckpt.parts.session.shard_writer = late


def fail_in_background(rank, run, late=False):
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True) as ckpt:
        ckpt.restore(job.state)
        if rank == 0 and late:
            begin_when_aborted(ckpt)
        if rank == 1:
            stage = ckpt.parts.saver._staging.stage
            ckpt.parts.saver._staging.stage = lambda *arguments, **more: (_ for _ in ()).throw(MemoryError("no room"))
        failed = ckpt.save(0, job.state).committed.exception(timeout=60)
        if rank == 1:
            ckpt.parts.saver._staging.stage = stage
        after = ckpt.save(1, job.state).committed.result(timeout=60)
        return type(failed).__name__, "rank 1 failed" in str(failed) or "no room" in str(failed), after.step


def test_a_rank_that_cannot_stage_aborts_the_checkpoint_at_once_and_the_next_save_goes_on(run, service):
    assert run_ranks(fail_in_background, 2, run) == [("SaveFailed", True, 1)] * 2
    aborted = [view for view in service.client.checkpoints.all(*run.split("/")) if view.state != "committed"]
    assert {(view.step, view.state) for view in aborted} == {(0, "aborted")}
    # Rank 0 may have heard of it first, and given its own part up for that reason.
    assert all("ank 1 failed" in view.abort_reason for view in aborted)


def test_a_rank_that_begins_after_another_has_failed_does_not_wait_for_it(run, service):
    assert run_ranks(fail_in_background, 2, run, True) == [("SaveFailed", True, 1)] * 2
    aborted = [view for view in service.client.checkpoints.all(*run.split("/")) if view.state != "committed"]
    assert sorted((view.step, view.state, view.abort_rank) for view in aborted) == [
        (0, "aborted", 0),
        (0, "aborted", 1),
    ]


def save_by_the_clock(rank, run, pauses):
    saved = []
    with holdfast.Checkpointer(run, create=True, save=holdfast.Every(minutes=1 / 60)) as ckpt:
        ckpt.restore({})
        for step in range(100_000):
            time.sleep(pauses[rank])
            handle = ckpt.step(step, {})
            if handle is not None:
                saved.append(handle.committed.result(timeout=60).step)
            if len(saved) == 2:
                break
    return saved


@pytest.mark.rule("local-save-flag")
def test_ranks_of_other_speeds_save_by_the_clock_after_the_same_step(run):
    saved = run_ranks(save_by_the_clock, 3, run, [0.002, 0.004, 0.001])
    assert saved[0] == saved[1] == saved[2]
    assert len(saved[0]) == 2


def count_collectives_of_steps(rank, run):
    with holdfast.Checkpointer(run, create=True, save=holdfast.Every(minutes=60)) as ckpt:
        ckpt.restore({})
        ckpt.step(0, {})
        collectives = ckpt.parts.ranks.collectives
        for step in range(1, 1001):
            ckpt.step(step, {})
        return ckpt.parts.ranks.collectives - collectives


@pytest.mark.rule("local-save-flag")
def test_a_step_costs_no_collective(run):
    assert run_ranks(count_collectives_of_steps, 2, run) == [0, 0]


def count_votes(rank, run):
    """How many collectives a save of an unchanged plan makes."""
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True) as ckpt:
        ckpt.restore(job.state)
        job.step(0)
        ckpt.save(0, job.state).committed.result(timeout=60)
        calls = []
        collective = ckpt.parts.ranks._collective
        ckpt.parts.ranks._collective = lambda call: (calls.append(1), collective(call))[1]
        for step in range(1, 4):
            job.step(step)
            ckpt.save(step, job.state).committed.result(timeout=60)
        return len(calls)


@pytest.mark.rule("layout-vote")
def test_a_save_with_an_unchanged_plan_costs_one_vote_before_it_and_one_on_its_health(run):
    assert run_ranks(count_votes, 2, run) == [6, 6]


def cast_between_saves(rank, run):
    import torch

    job = Job(rank, "plain", optimizer="sgd", loader=False)
    with holdfast.Checkpointer(run, create=True) as ckpt:
        ckpt.restore(job.state)
        ckpt.save(0, job.state).committed.result(timeout=60)
        job.state["model"].to(torch.bfloat16)
        ckpt.save(1, job.state).committed.result(timeout=60)
    job = Job(rank, "plain", optimizer="sgd", loader=False)
    job.state["model"].to(torch.bfloat16)
    with holdfast.Checkpointer(run) as ckpt:
        start = ckpt.restore(job.state)
    return start, str(job.state["model"].scale.dtype)


@pytest.mark.rule("layout-vote")
def test_a_model_that_was_cast_after_a_save_is_saved_as_it_is_now(run):
    # One rank at a time has the only copy here: the plan's digest holds the dtypes, so it is made anew.
    assert run_ranks(cast_between_saves, 2, run) == [(2, "torch.bfloat16")] * 2


def wait_until_sealed(ckpt, ranks):
    """A rank that seals last hears of the commit at once, and waits for nothing."""
    while not any(view.sealed_ranks == ranks for view in ckpt.parts.client.checkpoints.all(*ckpt.run.split("/"))):
        time.sleep(0.05)


def waiters(rank, run):
    """Which ranks asked the service what became of the checkpoint."""
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True) as ckpt:
        ckpt.restore(job.state)
        ckpt.parts.pipeline.host_calls.close()  # together they would hear of the commit from their seal
        asked = []
        ask = ckpt.parts.pipeline._retrying_client.checkpoints.get
        ckpt.parts.pipeline._retrying_client.checkpoints.get = lambda *a, **k: (asked.append(1), ask(*a, **k))[1]
        if rank == 2:
            write = ckpt.parts.pipeline._write
            ckpt.parts.pipeline._write = lambda writer, job: (wait_until_sealed(ckpt, 2), write(writer, job))[1]
        ckpt.save(0, job.state).committed.result(timeout=60)
        return bool(asked)


@pytest.mark.rule("waiting-holds-nothing")
def test_one_rank_per_host_waits_for_the_commit(run):
    assert run_ranks(waiters, 3, run) == [True, False, False]


def test_the_training_helper_runs_without_a_run():
    assert train(0, None, 2).start == 0
