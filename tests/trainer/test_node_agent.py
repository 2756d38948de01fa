"""Saves that a rank hands to its node's agent: uploaded there, told as ever, and done here if the agent is gone."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch
from gloo import run_ranks
from tests.support.node_agent import agent_serve
from tests.support.ports import free_ports
from tests.support.training import Job, values

import holdfast
import holdfast.checkpointer
from holdfast import errors
from holdfast.layout.plan import ChunkSizes
from holdfast.save.job import SaveState
from holdfast_client.agent import connection, link
from holdfast_client.agent import messages as say
from holdfast_client.agent.channel import connect
from holdfast_client.chunks.uploader import ShardUploader
from holdfast_client.errors import ManifestConflict
from holdfast_client.local.tier import LocalTier
from holdfast_client.shard_writer import ShardWriter

SIZES = ChunkSizes(65536, 262144, 131072)


@pytest.fixture
def agent(tmp_path):
    with agent_serve(tmp_path / "agent.log") as served:
        yield served


@pytest.fixture
def agent_of_one_slab(tmp_path):
    """Keeps a state until the next one is staged, so that a rank has one slab."""
    with agent_serve(tmp_path / "agent.log", "--keep", "0") as served:
        yield served


@pytest.fixture
def only_the_agent_uploads(monkeypatch):
    def upload(*_):
        raise AssertionError("this process uploads")

    monkeypatch.setattr(ShardUploader, "upload", upload)


def state_at(step, count=300_000):
    return {"big": {"tensor": torch.full((count,), float(step)) + torch.arange(count)}}


def restored(run, count=300_000):
    state = state_at(-1, count)
    with holdfast.Checkpointer(run) as ckpt:
        return ckpt.restore(state), state


def assert_restores(run, step, count=300_000):
    start, state = restored(run, count)
    assert start == step + 1
    assert torch.equal(state["big"]["tensor"], state_at(step, count)["big"]["tensor"])


def wait_until(holds):
    until = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.usefixtures("only_the_agent_uploads")
def test_the_agent_uploads_and_the_handle_the_figures_and_the_restored_state_are_as_without_it(run, agent, monkeypatch):
    monkeypatch.setattr(connection, "TRAINING_SECONDS", 60.0)  # a crowded machine answers late
    job = Job()
    with holdfast.Checkpointer(run, agent=agent.socket, chunk_sizes=SIZES) as ckpt:
        ckpt.restore(job.state)
        for step in range(3):
            job.step(step)
            handle = ckpt.save(step, job.state, metrics={"loss": 1.0})
            assert handle.staged.done()
            view = handle.committed.result(timeout=60)
        assert (view.step, view.metrics["loss"].value, handle.state) == (2, 1.0, SaveState.COMMITTED)
        assert ckpt.stats.committed == 3
        assert 0 < ckpt.stats.sent_bytes == ckpt.stats.sent_chunk_bytes
        assert len([*ckpt.parts.saver._staging._places]) == 2, "the last state stays in the one"
    again = Job(seed=4)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(again.state) == 3
    assert values(again.state) == values(job.state)


@pytest.mark.usefixtures("only_the_agent_uploads")
def test_copies_beside_training_are_handed_over_when_they_are_over(run, agent):
    job = Job()
    with holdfast.Checkpointer(run, agent=agent.socket, overlap=True) as ckpt:
        ckpt.restore(job.state)
        for step in range(3):
            job.step(step)
            assert ckpt.save(step, job.state).committed.result(timeout=60).step == step
    again = Job(seed=4)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(again.state) == 3
    assert values(again.state) == values(job.state)


@pytest.mark.rule("overlap-is-guarded")
@pytest.mark.usefixtures("only_the_agent_uploads")
def test_a_write_that_ends_after_the_hand_over_and_before_the_agents_seal_does_not_commit(
    run, service, agent, monkeypatch
):
    job = Job(optimizer="momentum")
    begun = ShardWriter.begun_elsewhere

    def writes_late(writer, view):
        if view.step == 1:
            with torch.no_grad():
                job.state["model"].up.weight.mul_(0.5)
        begun(writer, view)

    monkeypatch.setattr(ShardWriter, "begun_elsewhere", writes_late)
    with holdfast.Checkpointer(run, agent=agent.socket, overlap=True) as ckpt:
        ckpt.restore(job.state)
        for step in range(2):
            job.step(step)
            handle = ckpt.save(step, job.state)
            handle.committed.exception(timeout=60)
        with pytest.raises(errors.SaveFailed, match=r"'model/up.weight' was written to"):
            handle.committed.result()
        assert handle.state is SaveState.LOST
        job.step(2)
        assert ckpt.save(2, job.state).committed.result(timeout=60).step == 2, "that tensor is copied first now"
    states = {view.step: view.state for view in service.client.checkpoints.all(*run.split("/"))}
    assert states == {0: "committed", 1: "aborted", 2: "committed"}


@pytest.mark.usefixtures("only_the_agent_uploads")
def test_frozen_tensors_are_hashed_once_for_each_slab(run, agent):
    state = {"big": {"tensor": torch.arange(300_000.0)}, "small": {"tensor": torch.zeros(5)}}
    with holdfast.Checkpointer(run, agent=agent.socket, frozen=["big/*"], chunk_sizes=SIZES) as ckpt:
        ckpt.restore(state)
        for step in range(4):
            state["small"]["tensor"] += 1
            ckpt.save(step, state).committed.result(timeout=60)
        assert all(place.layout.frozen.digests for place in ckpt.parts.saver._staging._places)


@pytest.mark.usefixtures("only_the_agent_uploads")
def test_an_error_that_the_agent_meets_is_the_saves_own(run, agent):
    with holdfast.Checkpointer(run, agent=agent.socket) as ckpt:
        ckpt.restore({})
        assert ckpt.save(0, state_at(0)).committed.result(timeout=60).step == 0
        failure = ckpt.save(0, state_at(5)).committed.exception(timeout=60)
        assert isinstance(failure, errors.SaveFailed)
        assert isinstance(failure.__cause__, ManifestConflict)
        assert ckpt.save(1, state_at(1)).committed.result(timeout=60).step == 1
    assert_restores(run, 1)


def mapped(agent):
    """How many slabs the agent has mapped."""
    return Path(f"/proc/{agent.process.pid}/maps").read_text().count("memfd:holdfast-staging")


def test_the_agent_maps_no_memory_that_a_job_has_given_up(run, agent_of_one_slab):
    agent = agent_of_one_slab
    with holdfast.Checkpointer(run, agent=agent.socket) as ckpt:
        ckpt.restore({})
        ckpt.save(0, state_at(0)).committed.result(timeout=60)
        assert mapped(agent) == 1
        assert isinstance(ckpt.save(0, state_at(5)).committed.exception(timeout=60), errors.SaveFailed)
        ckpt.save(1, state_at(1, 600_000)).committed.result(timeout=60)
        wait_until(lambda: mapped(agent) == 1)
    wait_until(lambda: not mapped(agent))


@pytest.mark.usefixtures("only_the_agent_uploads")
def test_an_agent_without_a_free_descriptor_rests_until_it_has_one(run, agent):
    process = agent.process.pid
    before = resource.prlimit(process, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{process}/fd")}
    free = next(number for number in itertools.count() if number not in used)
    resource.prlimit(process, resource.RLIMIT_NOFILE, (free, before[1]))
    waiting = connect(agent.socket, 60)
    told = "could not be taken"
    wait_until(lambda: agent.log.count(told) >= 3)
    times = [datetime.fromisoformat(line[:23]) for line in agent.log.splitlines() if told in line]
    assert times[2] - times[0] > timedelta(seconds=1)
    resource.prlimit(process, resource.RLIMIT_NOFILE, before)
    with holdfast.Checkpointer(run, agent=agent.socket) as ckpt:
        ckpt.restore({})
        ckpt.save(0, state_at(0)).committed.result(timeout=60)
    waiting.close()


def test_without_an_agent_the_saves_stay_here_and_the_log_says_so_once(run, tmp_path, caplog):
    with holdfast.Checkpointer(run, agent=tmp_path / "agent.sock") as ckpt:
        ckpt.restore({})
        for step in range(2):
            ckpt.save(step, state_at(step)).committed.result(timeout=60)
    assert caplog.text.count("`holdfast agent serve`") == 1
    assert_restores(run, 1)


def test_what_is_over_the_agents_budget_stays_here_and_the_log_says_what_helps(run, tmp_path, caplog):
    with agent_serve(tmp_path / "log", "--memory", "1MB") as agent:
        with holdfast.Checkpointer(run, agent=agent.socket) as ckpt:
            ckpt.restore({})
            for step in range(2):
                ckpt.save(step, state_at(step)).committed.result(timeout=60)
        assert caplog.text.count("larger `--memory`") == 1
        with holdfast.Checkpointer(f"{run}2", agent=agent.socket, create=True) as ckpt:
            ckpt.restore({})
            assert ckpt.save(0, state_at(0, 1000)).committed.result(timeout=60).step == 0
            assert ckpt.parts.agent._link is not None, "a smaller state fits"
    assert_restores(run, 1)


def test_an_agent_of_another_version_is_left_alone(run, agent, monkeypatch, caplog):
    monkeypatch.setattr(say, "VERSION", say.VERSION + 1)
    with holdfast.Checkpointer(run, agent=agent.socket) as ckpt:
        ckpt.restore({})
        ckpt.save(0, state_at(0)).committed.result(timeout=60)
    assert "Start the agent with the job's version" in caplog.text
    assert_restores(run, 0)


class HelloOfLater(say.Hello):
    more: int = 0


def test_an_agent_that_does_not_understand_a_word_is_left_alone(run, agent, monkeypatch, caplog):
    monkeypatch.setattr(say, "Hello", HelloOfLater)
    with holdfast.Checkpointer(run, agent=agent.socket) as ckpt:
        ckpt.restore({})
        ckpt.save(0, state_at(0)).committed.result(timeout=60)
    assert "Start the agent with the job's version" in caplog.text
    assert_restores(run, 0)


def test_when_the_agent_is_killed_this_process_goes_on_with_the_save_and_finds_the_next_agent(
    run, service, agent, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(link, "RETRY_SECONDS", 0.05)
    with holdfast.Checkpointer(run, agent=agent.socket, create=True, chunk_sizes=SIZES) as ckpt:
        ckpt.restore({})
        assert ckpt.save(0, state_at(0)).committed.result(timeout=60).step == 0
        service.served.process.signal(signal.SIGSTOP)
        try:
            handle = ckpt.save(1, state_at(1))
            wait_until(lambda: handle.state is SaveState.UPLOADING)
            assert ckpt.parts.pipeline.in_flight[0].handed.is_with_agent
            agent.process.kill9()
            wait_until(lambda: "is uploaded by this process" in caplog.text)
        finally:
            service.served.process.signal(signal.SIGCONT)
        assert handle.committed.result(timeout=60).step == 1
        assert ckpt.save(2, state_at(2)).committed.result(timeout=60).step == 2
        with agent_serve(tmp_path / "next.log", socket=agent.socket):
            wait_until(lambda: ckpt.parts.agent._has_link)
            assert ckpt.save(3, state_at(3)).committed.result(timeout=60).step == 3
            assert ckpt.parts.agent._link._shared
    assert_restores(run, 3)


def test_an_agent_that_is_stopped_counts_as_gone_and_its_memory_gets_no_other_save(
    run, service, agent, monkeypatch, caplog
):
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 0.5)
    with holdfast.Checkpointer(run, agent=agent.socket, create=True, chunk_sizes=SIZES) as ckpt:
        ckpt.restore({})
        service.served.process.signal(signal.SIGSTOP)
        try:
            handle = ckpt.save(0, state_at(0))
            [first] = [place.slab.shared.id for place in ckpt.parts.saver._staging._places]
            wait_until(lambda: handle.state is SaveState.UPLOADING)
            agent.process.signal(signal.SIGSTOP)
            wait_until(lambda: "is uploaded by this process" in caplog.text)
        finally:
            service.served.process.signal(signal.SIGCONT)
        assert handle.committed.result(timeout=60).step == 0
        second = ckpt.save(1, state_at(1))
        [place] = ckpt.parts.saver._staging._places
        assert place.slab.shared.id != first
        agent.process.signal(signal.SIGCONT)  # it finishes what it has, and changes nothing
        assert second.committed.result(timeout=60).step == 1
        wait_until(lambda: "for a rank that is gone" in agent.log)
    assert_restores(run, 1)


@pytest.mark.usefixtures("only_the_agent_uploads")
def test_training_does_not_wait_for_the_answer_of_an_agent_that_is_stopped(run, agent, monkeypatch, caplog):
    monkeypatch.setattr(connection, "TRAINING_SECONDS", 0.1)
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 3600)
    with holdfast.Checkpointer(run, agent=agent.socket) as ckpt:
        ckpt.restore({})
        ckpt.save(0, state_at(0)).committed.result(timeout=60)
        agent.process.signal(signal.SIGSTOP)
        handle = ckpt.save(1, state_at(1))
        assert "does not answer" in caplog.text
        agent.process.signal(signal.SIGCONT)  # it reads what was sent
        assert handle.committed.result(timeout=60).step == 1
    assert_restores(run, 1)


def test_training_does_not_wait_for_an_agent_that_stays_stopped_until_it_is_back(run, agent, monkeypatch, caplog):
    monkeypatch.setattr(connection, "TRAINING_SECONDS", 0.1)
    monkeypatch.setattr(link, "RETRY_SECONDS", 0.05)
    with holdfast.Checkpointer(run, agent=agent.socket) as ckpt:
        ckpt.restore({})
        agent.process.signal(signal.SIGSTOP)
        monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.1)
        handle = ckpt.save(0, state_at(0))
        wait_until(lambda: "is uploaded by this process" in caplog.text)
        monkeypatch.setattr(connection, "ANSWER_SECONDS", 3600)  # of the next connection, which a thread waits for
        for step in range(1, 4):
            assert handle.committed.result(timeout=60).step == step - 1
            handle = ckpt.save(step, state_at(step))
        assert caplog.text.count("is uploaded by this process") == 1
        assert not ckpt.parts.agent._has_link
        agent.process.signal(signal.SIGCONT)
        wait_until(lambda: ckpt.parts.agent._has_link)
        assert ckpt.save(4, state_at(4)).committed.result(timeout=60).step == 4
        assert ckpt.parts.agent._link._shared
    assert_restores(run, 4)


def test_a_hand_over_that_is_interrupted_goes_on_here_and_its_memory_gets_no_other_save(
    run, agent_of_one_slab, monkeypatch
):
    agent = agent_of_one_slab

    def interrupted(*_):
        raise KeyboardInterrupt

    with holdfast.Checkpointer(run, agent=agent.socket) as ckpt:
        ckpt.restore({})
        ckpt.save(0, state_at(0)).committed.result(timeout=60)
        [first] = [place.slab.shared.id for place in ckpt.parts.saver._staging._places]
        with monkeypatch.context() as patched:
            patched.setattr(connection, "_taken", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(1, state_at(1))
        assert ckpt.wait(60)
        assert ckpt.save(2, state_at(2)).committed.result(timeout=60).step == 2
        [second] = [place.slab.shared.id for place in ckpt.parts.saver._staging._places]
        assert (ckpt.stats.committed, second != first) == (3, True)
    assert_restores(run, 2)


def test_a_token_that_the_agent_was_told_and_that_is_over_costs_no_save(run, agent, monkeypatch, caplog):
    told, first = say.Caller.of, iter([{"token": "hold_over"}])
    monkeypatch.setattr(say.Caller, "of", lambda settings: told(settings).model_copy(update=next(first, {})))
    with holdfast.Checkpointer(run, agent=agent.socket) as ckpt:
        ckpt.restore({})
        assert ckpt.save(0, state_at(0)).committed.result(timeout=60).step == 0
        wait_until(lambda: ckpt.parts.agent._has_link)
        assert ckpt.save(1, state_at(1)).committed.result(timeout=60).step == 1
        assert ckpt.parts.agent._has_link
    assert caplog.text.count("is uploaded by this process") == 1
    assert_restores(run, 1)


def test_a_service_that_the_agent_alone_does_not_reach_costs_no_save(run, agent, monkeypatch, caplog):
    monkeypatch.setenv("HOLDFAST_SAVE_RETRY_SECONDS", "2")  # how long the agent tries
    told = say.Caller.of
    elsewhere = {"url": f"http://127.0.0.1:{free_ports()}"}
    monkeypatch.setattr(
        *(say.Caller, "of"),
        lambda settings: told(settings).model_copy(update={"settings": told(settings).settings | elsewhere}),
    )
    with holdfast.Checkpointer(run, agent=agent.socket) as ckpt:
        ckpt.restore({})
        assert ckpt.save(0, state_at(0)).committed.result(timeout=60).step == 0
        assert not ckpt.parts.agent._link.is_lost
    assert "is uploaded by this process" in caplog.text
    assert_restores(run, 0)


def test_with_a_local_tier_the_agent_has_the_save_until_it_is_on_the_disk(run, agent, tmp_path):
    with holdfast.Checkpointer(run, agent=agent.socket, local=tmp_path / "nvme") as ckpt:
        ckpt.restore({})
        handles = [ckpt.save(step, state_at(step)) for step in range(2)]
        assert [handle.local.result(timeout=60) for handle in handles] == [True, True]
        assert [handle.committed.result(timeout=60).step for handle in handles] == [0, 1]
    tier = LocalTier(tmp_path / "nvme", None)
    assert not tier.spool.read().records
    tier.close()
    assert_restores(run, 1)


def test_a_save_that_is_given_up_for_a_newer_one_is_given_up_by_the_agent_too(run, agent, monkeypatch):
    monkeypatch.setenv("HOLDFAST_MAX_BYTES_PER_SECOND", "65536")
    with holdfast.Checkpointer(run, agent=agent.socket, chunk_sizes=SIZES) as ckpt:
        ckpt.restore({})
        first = ckpt.save(0, state_at(0))
        wait_until(lambda: first.state is SaveState.UPLOADING)
        ckpt.parts.pipeline.supersede("a test wants the next one")
        assert isinstance(first.committed.exception(timeout=60), errors.SaveSuperseded)
        assert ckpt.parts.pipeline.wait_free(60)
        assert ckpt.save(1, state_at(1, 10_000)).committed.result(timeout=60).step == 1
    assert_restores(run, 1, 10_000)


def save_and_fail(run, agent, handles):
    with holdfast.Checkpointer(run, agent=agent.socket, chunk_sizes=SIZES) as ckpt:
        ckpt.restore({})
        handles.append(ckpt.save(0, state_at(0, 80_000)))
        agent.process.signal(signal.SIGSTOP)  # it commits nothing before the job has ended, however long that takes
        raise ZeroDivisionError


def test_a_job_that_ends_by_an_error_leaves_its_save_to_the_agent(run, agent, monkeypatch, caplog):
    monkeypatch.setattr(holdfast.checkpointer, "_DRAIN_AFTER_ERROR_SECONDS", 0)
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 90)
    monkeypatch.setattr(connection, "TRAINING_SECONDS", 60.0)
    monkeypatch.setenv("HOLDFAST_MAX_BYTES_PER_SECOND", "131072")
    handles = []
    with pytest.raises(ZeroDivisionError):
        save_and_fail(run, agent, handles)
    agent.process.signal(signal.SIGCONT)
    assert isinstance(handles[0].committed.exception(timeout=60), errors.SaveFailed)
    assert "the agent of this node goes on with it" in caplog.text
    assert "was given up" not in caplog.text
    monkeypatch.delenv("HOLDFAST_MAX_BYTES_PER_SECOND")
    monkeypatch.setenv("HOLDFAST_AGENT", str(agent.socket))
    assert_restores(run, 0, 80_000)


def save_together(rank, run, socket):
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, agent=socket, create=True) as ckpt:
        ckpt.restore(job.state)
        job.step(0)
        view = ckpt.save(0, job.state).committed.result(timeout=60)
        return view.step, values(job.state)


def restore_together(rank, run):
    job = Job(rank, "ddp", seed=3)
    with holdfast.Checkpointer(run) as ckpt:
        return ckpt.restore(job.state), values(job.state)


def test_two_ranks_hand_over_to_one_agent(run, agent):
    saved = run_ranks(save_together, 2, run, agent.socket)
    found = run_ranks(restore_together, 2, run)
    assert [step for step, _ in found] == [1, 1]
    assert [state for _, state in found] == [state for _, state in saved]
    assert "gone" not in agent.log
