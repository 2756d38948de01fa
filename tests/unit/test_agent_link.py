"""A rank's side of the node agent, where two of its threads meet."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast_client.agent import channel, connection
from holdfast_client.agent import messages as say
from holdfast_client.agent.channel import Channel, ChannelClosed
from holdfast_client.agent.connection import AgentRefused, Connection
from holdfast_client.agent.link import HandedSave, NodeAgent
from holdfast_client.agent.shared_memory import SharedMemory
from holdfast_client.chunks.peer_http import PeerAddress
from holdfast_client.errors import TransferStopped
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import ShardSummary

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="agents need Linux")


def frames(channel):
    """All that the other side has said."""
    said = []
    try:
        while True:
            said.append(say.ASKED.validate_json(channel.receive()[0]))
    except ChannelClosed:
        return said


class Leaving:
    """A writer of a job that ends, as close() does it, between two looks of the upload thread."""

    on_verified = None

    def __init__(self, handed):
        self.handed = handed

    @property
    def is_stopped(self):
        self.handed.leave()
        return True


def test_a_save_that_is_left_to_the_agent_is_not_stopped_there():
    ours, theirs = (Channel(each) for each in socket.socketpair())
    link = Connection(ours)
    memory = SharedMemory(4096)
    handed = HandedSave(link, memory, 1, 0.0)
    with pytest.raises(TransferStopped):
        handed.write(Leaving(handed), lambda: ShardSummary(components={}))
    link.close()
    assert [type(each) for each in frames(theirs)] == [say.Run]
    memory.close()
    theirs.close()


def test_a_save_that_fails_while_the_job_ends_is_released_or_left_to_the_agent_and_not_both(monkeypatch):
    ours, theirs = (Channel(each) for each in socket.socketpair())
    link = Connection(ours)
    memory = SharedMemory(4096)
    handed = HandedSave(link, memory, 1, 0.0)
    upload, taken = threading.Thread(target=handed.release), handed._is_taken

    def meanwhile():
        if upload.ident is None:
            upload.start()
            upload.join(0.1)  # it may have to wait for this thread
        return taken()

    monkeypatch.setattr(handed, "_is_taken", meanwhile)
    handed.leave()
    upload.join(60)
    link.close()
    assert (handed.is_left, frames(theirs)) == (True, [])
    memory.close()
    theirs.close()


def test_a_save_that_is_released_before_the_agent_has_it_is_not_kept():
    """Its memory is free then, and nobody would say that the next save is staged there."""
    ours, theirs = (Channel(each) for each in socket.socketpair())
    link = Connection(ours)
    memory = SharedMemory(4096)
    HandedSave(link, memory, 1, 0.0, [Future()]).release(["d" * 64])
    assert (memory.is_kept, memory.may_be_read) == (False, False)
    taken = Future()
    taken.set_result(say.Taken())
    HandedSave(link, memory, 2, 0.0, [taken]).release(["d" * 64])
    assert memory.is_kept
    link.close()
    assert [(each.number, len(each.digests)) for each in frames(theirs)[:-1]] == [(1, 0), (2, 1)]
    memory.close()
    theirs.close()


def test_the_next_save_does_not_wait_long_until_a_hung_agent_takes_the_release_of_this_one(monkeypatch):
    ours, theirs = (Channel(each) for each in socket.socketpair())
    link = Connection(ours)
    memory = SharedMemory(4096)
    waits = []
    monkeypatch.setattr(ours, "send", lambda _, seconds=channel.SEND_SECONDS: waits.append(seconds))
    HandedSave(link, memory, 1, 0.0).release(["d" * 64])
    assert waits == [connection.TRAINING_SECONDS]
    link.close()
    memory.close()
    theirs.close()


def test_training_waits_once_for_an_agent_that_hangs(monkeypatch):
    ours, theirs = (Channel(each) for each in socket.socketpair())
    link = Connection(ours)
    memory = SharedMemory(4096)
    monkeypatch.setattr(connection, "TRAINING_SECONDS", 0.05)
    with pytest.raises(TimeoutError):
        link.share_spare(memory)
    waits = []
    monkeypatch.setattr(connection, "_taken", lambda _, seconds: waits.append(seconds))
    link.wait_a_moment(memory, [link.ask(say.Borrow())])
    assert waits == [pytest.approx(0, abs=0.01)]
    link.close()
    memory.close()
    theirs.close()


LENT = say.Lent(chunks=[], documents=[])


def lend(theirs, memory, *, ends):
    """As an agent answers Borrow."""
    with suppress(ChannelClosed):  # nobody waits any more
        theirs.receive()
        theirs.send(LENT, (b"{}",), memory.descriptor)
        if ends:
            theirs.send(say.Taken())


def opened(memory):
    """How often this process has it open."""
    inode = os.fstat(memory.descriptor).st_ino
    return sum(each.exists() and each.stat().st_ino == inode for each in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("ends", [True, False])
def test_a_restore_gets_what_is_lent_and_one_that_waits_no_longer_leaves_nothing_open(monkeypatch, ends):
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 60 if ends else 0.05)
    ours, theirs = (Channel(each) for each in socket.socketpair())
    lost = threading.Event()
    link = Connection(ours, on_lost=lost.set)
    memory = SharedMemory(4096)
    before = opened(memory)
    agent = threading.Thread(target=lend, args=(theirs, memory), kwargs={"ends": ends})
    agent.start()
    if ends:
        [(part, documents, descriptor)] = link.borrow()
        assert (part, documents, opened(memory)) == (LENT, b"{}", before + 1)
        os.close(descriptor)
        link.close()
    else:
        with pytest.raises(ChannelClosed, match="has not answered"):
            link.borrow()
    agent.join(60)
    assert lost.wait(60)
    assert opened(memory) == before
    memory.close()
    theirs.close()


def test_a_new_agent_that_hangs_as_it_hears_of_the_others_holds_no_lock_that_training_wants(monkeypatch):
    ours, theirs = (Channel(each) for each in socket.socketpair())
    caller = say.Caller(settings={}, token=None)
    agent = NodeAgent(Path("agent.sock"), RunName("p", "r"), 0, host_ranks=1, transfers=1, caller=lambda: caller)
    agent.meet(0, [say.PeerHere(address=PeerAddress("127.0.0.1", 1, "t"), ranks=[])])
    said = []
    monkeypatch.setattr("holdfast_client.agent.link.connect", lambda *_: ours)
    monkeypatch.setattr(Connection, "greet", lambda *_: None)
    monkeypatch.setattr(ours, "send", lambda frame: said.append((type(frame), agent._lock.locked())))
    agent._connect()
    assert said == [(say.Meet, False)]
    agent.close(is_finished=False)
    theirs.close()


def test_before_a_rank_does_without_a_slab_more_copies_make_room_in_its_container(monkeypatch):
    said = []

    class Link:
        is_lost = owes = False

        def make_room(self, spare):
            said.append(spare)
            if len(said) > 2:
                raise AgentRefused

        def share_spare(self, _):
            said.append("shared")

        def keep_less(self, _):
            said.append("less")

    agent = NodeAgent(Path("agent.sock"), RunName("p", "r"), 0, host_ranks=2, transfers=1, caller=lambda: None)
    agent._link = Link()
    rooms = iter([0, 4096, 8192, 8192, 0, 0])
    monkeypatch.setattr("holdfast_client.agent.link.container_room_bytes", lambda: next(rooms))
    agent.spare_memory(4096).close()
    assert agent.spare_memory(4096) is None
    assert said == [True, True, "shared", True, "less"]
