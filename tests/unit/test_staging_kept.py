"""Which slab a save gets if a node agent keeps the states in them: the last one stays while the next one is staged."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from holdfast.layout.plan import ChunkSizes, build_local_plan
from holdfast.staging import StagingArea
from holdfast_client.agent import connection, link
from holdfast_client.agent.link import NodeAgent, status_of
from holdfast_client.agent.messages import Caller, HandOver
from holdfast_client.agent.server import Agent
from holdfast_client.agent.shared_memory import SharedMemory, untouched_bytes
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import IndexOrdinals, ShardSummary
from holdfast_protocol.states import CheckpointKind
from tests.support.gpus import OnGpu, gpus
from tests.support.staged import pieces_of

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="agents need Linux")
SIZES = ChunkSizes(own_chunk_bytes=1024, cut_bytes=4096, pack_bytes=2048)


@pytest.fixture(autouse=True)
def _a_crowded_machine_answers_late(monkeypatch):
    monkeypatch.setattr(connection, "TRAINING_SECONDS", 60.0)


class Job:
    """One rank whose agent keeps `keeps` states. No save of it calls a service."""

    def __init__(self, node, *, on_gpu=False):
        self.node, self.on_gpu = node, on_gpu
        self.area = StagingArea(agent=node)
        self.number = 0

    def save(self, *, commits=True, count=600):
        """The address of the slab that it was staged into."""
        self.number += 1
        pieces = pieces_of({"a": torch.full((count,), float(self.number))})
        plan = build_local_plan([piece.spec for piece in pieces], rank=0, world_size=1, sizes=SIZES)
        placed = [piece._replace(local=OnGpu(piece.local)) for piece in pieces] if self.on_gpu else pieces
        shard = self.area.stage(plan, placed)
        memory, _ = shard.in_shared_memory()
        handed = self.node.hand_over(memory, self.hand(memory), [b"{}"], retry_seconds=0)
        handed.release(["d" * 64] if commits else ())
        shard.release()
        return memory.id

    def hand(self, memory):
        return HandOver(
            project="p",
            run="r",
            epoch=1,
            attempt=1,
            launch_id="a" * 8,
            number=self.number,
            step=self.number,
            kind=CheckpointKind.PERIODIC,
            world_size=1,
            rank=0,
            memory=memory.id,
            chunks=[],
            documents=[2],
            index=IndexOrdinals(shard=0, layout=None),
            summary=ShardSummary(components={}),
            retry_seconds=0,
        )


@contextmanager
def node(keeps=1, pages=100_000):
    """An agent, as a rank of the run sees it."""
    with tempfile.TemporaryDirectory(prefix="holdfast-agent-") as folder:
        path = Path(folder) / "agent.sock"
        agent = Agent(path, pages * 4096, keeps=keeps)
        serving = threading.Thread(target=agent.serve, kwargs={"grace_seconds": 0})
        serving.start()
        caller = Caller(settings={"url": "http://127.0.0.1:1"}, token="t")
        rank = NodeAgent(path, RunName("p", "r"), 0, host_ranks=1, transfers=1, caller=lambda: caller)
        rank.settle(60)  # connects
        try:
            yield rank
        finally:
            rank.close(is_finished=True)
            agent.end()
            serving.join(60)


@pytest.mark.parametrize("keeps", [0, 1, 2])
def test_saves_take_turns_with_one_slab_more_than_there_are_states_to_stay(keeps):
    with node(keeps) as rank:
        job = Job(rank)
        slabs = [job.save() for _ in range(7)]
        assert len(set(slabs)) == keeps + 1
        assert all(slabs[at] == slabs[at - keeps - 1] for at in range(keeps + 1, 7))
        job.area.close()


def test_the_memory_for_the_next_save_is_there_before_it(monkeypatch):
    """Else that save would hold training until the system has found the memory."""
    made = []

    def noted(size_bytes):
        made.append(SharedMemory(size_bytes))
        return made[-1]

    monkeypatch.setattr(link, "SharedMemory", noted)
    with node() as rank:
        job = Job(rank)
        first = job.save(count=6_000_000)  # more than is populated at once
        while not made or untouched_bytes(made[0].descriptor, made[0].bytes):
            time.sleep(0.01)
        assert status_of(rank.path).memory_bytes == 2 * made[0].bytes
        assert job.save(count=6_000_000) == made[0].id != first
        assert len(made) == 1
        job.area.close()


def test_the_slab_of_a_failed_save_is_the_next_one():
    with node() as rank:
        job = Job(rank)
        first, failed = job.save(), job.save(commits=False)
        assert [job.save(), job.save()] == [failed, first]
        job.area.close()


def test_a_larger_state_gets_larger_slabs():
    with node() as rank:
        job = Job(rank)
        small = {job.save(), job.save()}
        large = {job.save(count=6000), job.save(count=6000)}
        assert len(small | large) == 4
        assert {job.save(count=6000), job.save(count=6000)} == large
        job.area.close()


def test_a_state_that_a_lost_connection_has_kept_is_not_staged_over():
    with node(keeps=0) as rank:
        job = Job(rank)
        kept = job.save()
        rank._link.lose()
        rank.settle(60)
        assert job.save() != kept
        rank.settle(60)  # behind what was said before
        [state] = status_of(rank.path).kept
        assert (state.step, state.parts) == (2, 1)
        job.area.close()


def test_a_state_of_an_ended_launch_makes_room_if_the_container_has_none(monkeypatch):
    """Its pages still count there, and the next launch would be killed at its first save."""
    with node(keeps=0) as rank:
        job = Job(rank)
        job.save()
        rank._link.lose()  # its launch has ended
        rank.settle(60)
        while status_of(rank.path).ranks > 1:
            pass
        kept = []

        def room():
            kept.append(len(status_of(rank.path).kept))
            return 0 if kept[-1] else 1000_000

        monkeypatch.setattr(link, "container_room_bytes", room)
        Job(rank).save()
        assert kept == [1, 0]
        job.area.close()


def test_where_no_memory_can_be_shared_saves_stay_in_this_process_and_the_log_says_why(monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError(1, "not in this sandbox")

    with node() as rank:
        monkeypatch.setattr(os, "memfd_create", refuse)
        pieces = pieces_of({"a": torch.arange(600.0)})
        plan = build_local_plan([piece.spec for piece in pieces], rank=0, world_size=1, sizes=SIZES)
        area = StagingArea(agent=rank)
        shard = area.stage(plan, pieces)
        assert shard.in_shared_memory() is None
        shard.release()
        area.close()
    assert "not in this sandbox" in caplog.text


def test_memory_that_is_shared_again_counts_once():
    with node() as rank:
        memory = SharedMemory(4096)
        for _ in range(2):
            rank._link._share(memory).result(60)
        assert status_of(rank.path).memory_bytes == 4096
        memory.close()


def test_without_room_for_one_more_there_is_one_and_the_log_says_so_once(caplog):
    with node(pages=1) as rank:
        job = Job(rank)
        assert len({job.save() for _ in range(4)}) == 1
        job.area.close()
    assert caplog.text.count("keeps a state only until the next one is staged") == 1


def test_one_more_that_cannot_be_page_locked_is_given_up_after_its_save(caplog):
    with node() as rank, gpus() as here:
        job = Job(rank, on_gpu=True)
        first = job.save()
        here.refusal = 2
        assert job.save() != first
        here.refusal = 0
        assert [job.save(), job.save()] == [first, first]
        assert here.calls.count("lock") == 2
        job.area.close()
    assert "cannot be page-locked" in caplog.text
    assert caplog.text.count("keeps a state only until the next one is staged") == 1
