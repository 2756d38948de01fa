"""Restores from the memory of this node's agent: after kill -9 nothing comes from the store, and what is not right in
that memory comes from elsewhere. A proxy counts what the store gives."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests.support.fault_proxy import fault_proxy
from tests.support.handing_rank import digest_of, state_of
from tests.support.node_agent import agent_serve
from tests.support.ranks import launched, read_until

import holdfast
import holdfast.checkpointer
from holdfast import errors
from holdfast.layout.plan import ChunkSizes
from holdfast.staging import StagingArea
from holdfast_client.agent import connection, link
from holdfast_client.agent.lent_chunks import LentChunks

RANK = "tests.support.handing_rank"
SIZE = 8 * 1024**2
SIZES = ChunkSizes(65536, 262144, 131072)
FOUND = "in the memory of the node agents"


@pytest.fixture
def agent(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "TRAINING_SECONDS", 60.0)  # of this process; a crowded machine answers late
    with agent_serve(tmp_path / "agent.log") as served:
        monkeypatch.setenv("HOLDFAST_AGENT", str(served.socket))
        yield served


@pytest.fixture
def proxy(service, monkeypatch):
    """Everything goes over HTTP, and through it."""
    with fault_proxy(int(service.served.url.rpartition(":")[2])) as running:
        monkeypatch.setenv("HOLDFAST_URL", running.url)
        monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
        yield running


def wait_until(holds):
    until = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def save_and_die(service, run, *, world_size=1, saves=2):
    """kill -9 to all ranks of a launch whose last step is committed."""
    with launched(RANK, run, saves, "stays", SIZE, world_size=world_size) as ranks:
        for rank in ranks:
            read_until(rank, f"saved {saves - 1}")
        restore_point = service.client.restores.restore_point
        wait_until(lambda: (point := restore_point(*run.split("/")).restore_point) and point.step == saves - 1)
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait(timeout=90)


def restored(run):
    """The next step, and the digest of the state."""
    state = state_of(-1, SIZE)
    with holdfast.Checkpointer(run) as ckpt:
        return ckpt.restore(state), digest_of(state)


def at(step):
    return step + 1, digest_of(state_of(step, SIZE))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_relaunch_after_kill_9_reads_nothing_from_the_store(run, service, agent, proxy, caplog, world_size):
    """With two ranks it has another world size too."""
    caplog.set_level("INFO")
    save_and_die(service, run, world_size=world_size)
    assert restored(run) == at(1)
    assert (proxy.count("get"), FOUND in caplog.text) == (0, True)


def test_two_ranks_come_again_and_each_reads_its_part_in_memory(run, service, agent, proxy):
    save_and_die(service, run, world_size=2)
    with launched(RANK, run, 0, "waits", SIZE, world_size=2) as ranks:
        said = [read_until(rank, "restored")[-1] for rank in ranks]
    step, digest = at(1)
    assert said == [f"restored {step} {digest}"] * 2
    assert proxy.count("get") == 0


def test_what_the_agent_has_finished_for_a_dead_rank_is_restored_from_memory(run, agent, proxy):
    with launched(RANK, run, 1, "killed", SIZE) as [rank]:
        rank.wait(timeout=90)
    assert restored(run) == at(0)
    assert proxy.count("get") == 0
    assert "for a rank that is gone" in agent.log


def memories(agent):
    """What the agent keeps open of its ranks' memory; a mapping has a descriptor of its own."""
    found = {}
    for each in Path(f"/proc/{agent.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(each).startswith("/memfd:holdfast-staging"):
                found[each.stat().st_ino] = each
    return list(found.values())


def test_a_flipped_byte_is_refused_and_that_chunk_comes_from_the_store(run, service, agent, proxy, caplog):
    save_and_die(service, run, saves=1)
    for memory in memories(agent):  # that of the next save may be there too
        with open(memory, "r+b", buffering=0) as file:
            file.seek(1000)
            byte = file.read(1)
            file.seek(1000)
            file.write(bytes([byte[0] ^ 1]))
    assert restored(run) == at(0)
    assert proxy.count("get") == 1
    assert caplog.text.count("other bytes for chunk") == 1


def test_an_agent_that_was_killed_before_has_nothing_and_the_store_has_all(run, service, agent, proxy, tmp_path):
    save_and_die(service, run)
    agent.process.kill9()
    with agent_serve(tmp_path / "next.log", socket=agent.socket):
        assert restored(run) == at(1)
    assert proxy.count("get") > 30


def test_the_memory_outlives_an_agent_that_is_killed_in_the_middle_of_a_restore(
    run, service, agent, proxy, monkeypatch
):
    save_and_die(service, run)
    read, first = LentChunks.read_into, threading.Lock()

    def killing(self, digest, *others):
        if first.acquire(blocking=False):
            agent.process.kill9()
        return read(self, digest, *others)

    monkeypatch.setattr(LentChunks, "read_into", killing)
    assert restored(run) == at(1)
    assert (agent.process.runs, proxy.count("get")) == (False, 0)


def test_an_agent_that_is_told_to_end_does_not_wait_for_what_it_keeps(run, service, agent):
    save_and_die(service, run)
    agent.process.signal(signal.SIGTERM)
    wait_until(lambda: not agent.process.runs)
    assert "could not be finished" not in agent.log
    assert restored(run) == at(1)


def test_with_a_local_tier_the_memory_is_read_before_the_disk(run, agent, proxy, tmp_path, caplog):
    caplog.set_level("INFO")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            save_and_fail(run, local=tmp_path / "nvme")
    assert (proxy.count("get"), FOUND in caplog.text) == (0, True)
    assert "found on the hosts" not in caplog.text


def save_and_fail(run, *, saves=1, local=None):
    """A launch in this process, whose end is an exception."""
    with holdfast.Checkpointer(run, local=local, chunk_sizes=SIZES) as ckpt:
        start = ckpt.restore(state_of(-1, SIZE))
        for step in range(start, start + saves):
            ckpt.save(step, state_of(step, SIZE)).committed.result(timeout=60)
        raise ZeroDivisionError


def test_a_launch_that_ends_while_it_stages_has_the_state_before_in_memory(run, agent, proxy, monkeypatch):
    stage, states = StagingArea.stage, []

    def ending(self, *of, **others):
        states.append(stage(self, *of, **others))
        if len(states) == 3:
            raise ZeroDivisionError
        return states[-1]

    monkeypatch.setattr(StagingArea, "stage", ending)
    with pytest.raises((ZeroDivisionError, errors.SaveFailed)):
        save_and_fail(run, saves=3)
    assert restored(run) == at(1)
    assert proxy.count("get") == 0


def save_wrong_and_fail(run):
    with holdfast.Checkpointer(run, chunk_sizes=SIZES) as ckpt:
        ckpt.restore({})
        ckpt.save(0, state_of(0, SIZE)).committed.result(timeout=60)
        assert isinstance(ckpt.save(0, state_of(5, SIZE)).committed.exception(timeout=60), errors.SaveFailed)
        raise ZeroDivisionError


def test_a_save_that_fails_is_not_kept_and_takes_no_place(run, agent, proxy):
    with pytest.raises(ZeroDivisionError):
        save_wrong_and_fail(run)
    wait_until(lambda: len(memories(agent)) == 1)
    assert restored(run) == at(0)
    assert proxy.count("get") == 0


def save_and_fail_at_once(run, agent):
    with holdfast.Checkpointer(run, chunk_sizes=SIZES) as ckpt:
        ckpt.restore({})
        ckpt.save(0, state_of(0, SIZE))
        agent.process.signal(signal.SIGSTOP)  # it commits nothing more before the job has ended
        raise ZeroDivisionError


def test_what_a_failed_job_has_left_to_the_agent_is_restored_from_memory(run, agent, proxy, monkeypatch):
    monkeypatch.setattr(holdfast.checkpointer, "_DRAIN_AFTER_ERROR_SECONDS", 0)
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 90)
    with pytest.raises(ZeroDivisionError):
        save_and_fail_at_once(run, agent)
    agent.process.signal(signal.SIGCONT)
    assert restored(run) == at(0)
    assert proxy.count("get") == 0


LESS = "keeps a state only until the next one is staged"


def test_with_memory_for_one_state_the_last_one_is_there_until_the_next_and_the_log_says_so_once(
    run, proxy, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(connection, "TRAINING_SECONDS", 60.0)
    with agent_serve(tmp_path / "agent.log", "--memory", "12MiB") as agent:
        monkeypatch.setenv("HOLDFAST_AGENT", str(agent.socket))
        with pytest.raises(ZeroDivisionError):
            save_and_fail(run, saves=4)
        assert caplog.text.count(LESS) == caplog.text.count("larger `--memory`") == 1
        wait_until(lambda: len(memories(agent)) == 1)
        assert restored(run) == at(3)
    assert proxy.count("get") == 0


def test_a_container_without_memory_for_two_states_keeps_one(run, agent, proxy, monkeypatch, caplog):
    monkeypatch.setattr(link, "container_room_bytes", lambda: SIZE // 2)
    with pytest.raises(ZeroDivisionError):
        save_and_fail(run, saves=3)
    assert caplog.text.count(LESS) == caplog.text.count("this container's memory limit leaves") == 1
    assert restored(run) == at(2)
    assert proxy.count("get") == 0


def test_a_kept_state_stays_while_the_next_one_is_staged_and_goes_when_that_is_whole(run, agent):
    with holdfast.Checkpointer(run, chunk_sizes=SIZES) as ckpt:
        ckpt.restore({})
        for step in range(4):
            ckpt.save(step, state_of(step, SIZE)).committed.result(timeout=60)
            assert len(memories(agent)) == 2 or step == 0  # then a thread makes the second one
        assert len([*ckpt.parts.saver._staging._places]) == 2
    wait_until(lambda: not memories(agent))  # the job has done its work


def test_a_launch_that_comes_while_the_other_one_lives_reads_the_same_memory(run, agent, proxy):
    said = []
    with suppress(errors.StaleAttempt), holdfast.Checkpointer(run, chunk_sizes=SIZES) as ckpt:
        ckpt.restore({})
        ckpt.save(0, state_of(0, SIZE)).committed.result(timeout=60)
        with launched(RANK, run, 0, "waits", SIZE) as [rank]:
            said = read_until(rank, "restored")
    step, digest = at(0)
    assert said[-1:] == [f"restored {step} {digest}"]
    assert proxy.count("get") == 0


def both(step):
    return {"base": {"w": torch.arange(1_000_000.0)}, "head": {"w": torch.arange(500_000.0) + step}}


def save_both_and_fail(run):
    with holdfast.Checkpointer(run, chunk_sizes=SIZES) as ckpt:
        ckpt.restore({})
        for step in range(3):
            ckpt.save(step, both(step)).committed.result(timeout=60)
        raise ZeroDivisionError


def test_of_an_older_state_what_has_not_changed_is_found_by_its_digest(run, agent, proxy):
    with pytest.raises(ZeroDivisionError):
        save_both_and_fail(run)
    state = both(-1)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(state, at="0") == 1
    assert torch.equal(state["head"]["w"], both(0)["head"]["w"])
    chunks_of_head = -(-2_000_000 // SIZES.cut_bytes)
    assert 0 < proxy.count("get") <= chunks_of_head + 3, "the head's, the documents, and no chunk of the base"
