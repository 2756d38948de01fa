"""Copies of a state between agents of several hosts, here loopback addresses: what they take, keep and give back."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest
from pydantic import SecretStr

from holdfast_client.agent import copies, lost_hosts, peer_chunks, peer_server
from holdfast_client.agent.copies import Copies
from holdfast_client.agent.held_save import Ledger
from holdfast_client.agent.memory_tier import MemoryTier, Part
from holdfast_client.agent.messages import Find, HandOver, Hello, Meet, Offer, Share, StagedChunk
from holdfast_client.agent.peer_chunks import Peer, PeerChunks, ask, read_chunk
from holdfast_client.agent.shared_memory import Budget, SharedMemory
from holdfast_client.chunks import peer_http
from holdfast_client.chunks.peer_http import PeerAddress, PeerError
from holdfast_client.errors import ConfigurationError
from holdfast_client.settings import ClientSettings
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import IndexOrdinals, ShardSummary
from holdfast_protocol.states import CheckpointKind

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="agents need Linux")
RUN = RunName("p", "r")
PAGE = 4096


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A crowded machine answers late. A test that waits for an end sets its own."""
    monkeypatch.setattr(peer_http, "CONNECT_SECONDS", 60.0)
    monkeypatch.setattr(peer_http, "SILENCE_SECONDS", 60.0)


def digest(body):
    return hashlib.sha256(body).hexdigest()


def wait_until(holds):
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


class Host:
    """An agent's memory and copies, and the one rank of its host."""

    def __init__(self, number, pages=100, earlier=None):
        self.budget = Budget(pages * PAGE)
        self.tier = MemoryTier(self.budget, 1)
        self.copies = Copies(self.tier, earlier, count=1, host=f"127.0.0.{number + 2}")
        self.rank = number

    def keep(self, number, *bodies, document=b"{}"):
        """A state of these chunks, as its rank has left it. Its memory."""
        theirs = SharedMemory(PAGE)
        chunks, start = [], 0
        for body in bodies:
            theirs.map[start : start + len(body)] = body
            chunks.append(StagedChunk(start=start, bytes=len(body)))
            start += len(body)
        hello = Hello.model_construct(project="p", run="r", rank=self.rank, host_ranks=1)
        memory = self.tier.take(hello, Share(memory=theirs.id, bytes=PAGE), theirs.descriptor)
        hand = HandOver(
            project="p",
            run="r",
            epoch=1,
            attempt=1,
            launch_id="a" * 8,
            number=number,
            step=number,
            kind=CheckpointKind.PERIODIC,
            world_size=4,
            rank=self.rank,
            memory=1,
            chunks=chunks,
            documents=[len(document)],
            index=IndexOrdinals(shard=0, layout=None),
            summary=ShardSummary(components={}),
            retry_seconds=0,
        )
        digests = [digest(body) for body in (*bodies, document)]
        self.part = Part(hand, 1, memory, digests, [document], 0)
        self.tier.keep(self.part)
        return theirs

    def offer_to(self, *hosts, **how):
        for host in hosts:
            known = host.copies._others.get(RUN, frozenset())
            host.copies.meet(RUN, [*known, self.copies.address])
        self.copies.offer(self.part, Meet(host=self.rank, others=[host.copies.address for host in hosts]), **how)

    def copies_of(self, rank):
        """The steps of its copies here."""
        return [state.step for state in self.tier.shown() if state.copy_of == rank]


@contextmanager
def hosts(count, **how):
    made = [Host(number, **how) for number in range(count)]
    try:
        yield made
    finally:
        for host in made:
            host.copies.close()
            host.tier.forget(RUN, [host.part.memory] if hasattr(host, "part") else ())


def read(found, body):
    buffer = bytearray(len(body))
    return bytes(buffer) if found.read_into(digest(body), memoryview(buffer), threading.Event()) else None


def find(host, *bodies, rank=0):
    found = PeerChunks(RUN, [Peer(host.copies.address, frozenset(host.tier.ranks_of(RUN)))])
    found.find({rank: {digest(body) for body in bodies}})
    return found


def test_a_lost_hosts_state_is_read_from_the_next_host():
    with hosts(3) as (lost, following, third):
        lost.keep(1, b"abc", b"defgh")
        lost.offer_to(following, third)
        wait_until(lambda: following.copies_of(0))
        lost.tier.forget(RUN, [lost.part.memory])
        found = find(following, b"abc", b"defgh", b"{}", b"else")
        assert [read(found, body) for body in (b"abc", b"defgh", b"{}", b"else")] == [b"abc", b"defgh", b"{}", None]
        assert found.taken_bytes == 10
        assert third.copies_of(0) == [], "one host has it, as was asked"


def test_a_newer_copy_takes_the_place_of_the_one_before_and_what_has_not_changed_is_not_sent_again(monkeypatch):
    sent = []
    monkeypatch.setattr(copies, "read_chunk", lambda *of: (sent.append(of[1]), read_chunk(*of))[1])
    with hosts(2) as (host, following):
        host.keep(1, b"same", b"one")
        host.offer_to(following)
        wait_until(lambda: following.copies_of(0) == [1])
        host.keep(2, b"same", b"two")
        host.offer_to(following)
        wait_until(lambda: following.copies_of(0) == [2])
        assert (sent.count(digest(b"same")), sent.count(digest(b"two"))) == (1, 1)
        wait_until(lambda: following.budget.taken_bytes == len(b"same") + len(b"two") + len(b"{}"))
        assert read(find(following, b"same"), b"same") == b"same"


def test_a_copy_that_was_made_before_the_commit_is_kept_with_it_and_not_made_again(monkeypatch):
    sent = []
    monkeypatch.setattr(copies, "read_chunk", lambda *a: (sent.append(a[1]), read_chunk(*a))[1])
    with hosts(2) as (here, there):
        here.keep(1, b"a" * 100, b"b" * 200)
        here.offer_to(there, is_safe=False)
        wait_until(lambda: there.copies_of(0) == [1])
        assert not there.tier.shown()[0].is_committed
        assert len(sent) == 3
        here.offer_to(there)
        wait_until(lambda: there.tier.shown()[0].is_committed)
        assert len(sent) == 3


class Finished:
    """In place of a HeldSave."""

    is_sealed = is_over = False

    def __init__(self, part, how, together):
        self.hand, self._together = part.hand, together
        self.is_committed, self.is_hopeless = how == "committed", how == "hopeless"

    def finish(self):
        self._together.wait()

    def stop(self):
        self._together.abort()


def begin(host):
    host.copies.lost_hosts.begin(RUN, ClientSettings(url="http://127.0.0.1:9", token=SecretStr("t")), 1, Ledger())


@pytest.mark.parametrize(("how", "left"), [("committed", [True] * 2), ("hopeless", []), ("outage", [False] * 2)])
def test_what_lost_hosts_have_left_is_finished_at_once_and_goes_only_without_hope(how, left, monkeypatch):
    with hosts(3) as (one, there, other):
        for each in (one, other):
            each.keep(2, b"c" * 10)
            each.offer_to(there, is_safe=False)
        wait_until(lambda: len(there.tier.unfinished(RUN)) == 2)
        for each in (one, other):
            each.copies.close()
        all_three = threading.Barrier(3, timeout=60)
        monkeypatch.setattr(lost_hosts, "_save_of", lambda part, *_: Finished(part, how, all_three))
        for _ in range(2):  # each rank of the node asks
            begin(there)
        assert there.copies.lost_hosts.is_sealing(RUN)
        assert not there.copies.lost_hosts.is_sealing(RunName("p", "another"))
        all_three.wait()
        wait_until(lambda: not there.copies.lost_hosts.is_sealing(RUN))
        assert [state.is_committed for state in there.tier.shown()] == left


def test_an_agent_that_ends_cuts_off_what_it_finishes_for_others(monkeypatch):
    with hosts(2) as (lost, there):
        lost.keep(2, b"c" * 10)
        lost.offer_to(there, is_safe=False)
        wait_until(lambda: there.tier.unfinished(RUN))
        lost.copies.close()
        never = threading.Barrier(2)
        monkeypatch.setattr(lost_hosts, "_save_of", lambda part, *_: Finished(part, "outage", never))
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        begin(there)
        there.copies.close()
        wait_until(lambda: never.broken)


def test_what_a_host_that_lives_has_handed_over_is_left_to_it(monkeypatch):
    with hosts(2) as (here, there):
        here.keep(1, b"c" * 10)
        here.offer_to(there, is_safe=False)
        wait_until(lambda: there.copies_of(0) == [1])
        monkeypatch.setattr(lost_hosts, "_save_of", lambda *_: pytest.fail("its own agent does it"))
        begin(there)
        assert len(there.tier.unfinished(RUN)) == 1


def test_what_an_agent_had_that_was_started_anew_is_finished_from_the_copy(monkeypatch):
    with hosts(2) as (lost, there):
        lost.keep(1, b"c" * 10)
        lost.offer_to(there, is_safe=False)
        wait_until(lambda: there.copies_of(0) == [1])
        lost.copies.close()
        again = Host(0, earlier=lost.copies.address)
        both = threading.Barrier(2, timeout=60)
        monkeypatch.setattr(lost_hosts, "_save_of", lambda part, *_: Finished(part, "committed", both))
        try:
            assert again.copies.address == lost.copies.address
            begin(there)
            both.wait()
            wait_until(lambda: there.tier.unfinished(RUN) == [])
        finally:
            again.copies.close()


def test_what_is_not_committed_is_taken_only_from_an_agent_that_the_job_knows():
    with hosts(2) as (here, there):
        here.keep(1, b"c" * 10)
        there.copies.meet(RUN, [])
        here.copies.offer(here.part, Meet(host=0, others=[there.copies.address]), is_safe=False)
        here.copies.offer(here.part, Meet(host=0, others=[there.copies.address]))
        wait_until(lambda: there.copies_of(0) == [1])
        assert there.tier.shown()[0].is_committed


def test_a_save_that_is_given_up_has_no_copy_any_more():
    with hosts(2) as (here, there):
        here.keep(1, b"c" * 10)
        here.offer_to(there, is_safe=False)
        wait_until(lambda: there.copies_of(0) == [1])
        here.copies.withdraw(here.part.hand, Meet(host=0, others=[there.copies.address]))
        wait_until(lambda: there.copies_of(0) == [])
        here.offer_to(there)
        wait_until(lambda: there.copies_of(0) == [1])
        here.copies.withdraw(here.part.hand, Meet(host=0, others=[there.copies.address]))
        here.keep(2, b"d" * 10)
        here.offer_to(there, is_safe=False)
        wait_until(lambda: 2 in there.copies_of(0))
        assert there.copies_of(0) == [1, 2], "what is committed stays"


def test_an_offer_of_the_next_save_does_not_take_the_place_of_the_word_that_this_one_is_committed(monkeypatch):
    first, goes_on = threading.Event(), threading.Event()

    def read_late(*asked):
        is_read = read_chunk(*asked)
        first.set()
        assert goes_on.wait(60)
        return is_read

    with hosts(2) as (here, there):
        monkeypatch.setattr(copies, "read_chunk", read_late)
        here.keep(1, b"c" * 10)
        here.offer_to(there, is_safe=False)
        assert first.wait(60)
        here.offer_to(there)
        here.keep(2, b"d" * 10)
        here.offer_to(there, is_safe=False)
        wait_until(lambda: len(there.copies._taken._waiting) == 2)
        goes_on.set()
        wait_until(lambda: there.copies_of(0) == [1, 2])
        assert [state.is_committed for state in there.tier.shown()] == [True, False]


def test_of_one_key_one_thing_is_worked_off_at_a_time_and_the_newest_comes_next():
    begun, goes_on, done = threading.Semaphore(0), threading.Event(), []

    def work(thing):
        begun.release()
        assert goes_on.wait(60)
        done.append(thing)

    things = copies._Newest("test", 2, work)
    things.put("a", 1)
    assert begun.acquire(timeout=60)
    things.put("a", 2)
    things.put("a", 3)
    things.put("b", 4)
    assert begun.acquire(timeout=60), "another key need not wait"
    assert not begun.acquire(timeout=0.1)
    goes_on.set()
    wait_until(lambda: sorted(done) == [1, 3, 4])
    things.end()


def test_a_copy_that_is_made_twice_is_there_once():
    with hosts(2) as (host, following):
        host.keep(1, b"abc")
        taken = []
        let_go = following.tier.let_go
        following.tier.let_go = lambda memory: (let_go(memory), taken.append(memory))
        for count in (1, 2):
            host.offer_to(following)
            wait_until(lambda count=count: len(taken) == count)
        assert (following.copies_of(0), following.budget.taken_bytes) == ([1], len(b"abc{}"))
        assert [memory.is_closed for memory in taken] == [True, False]


def test_other_bytes_than_the_digest_says_are_no_copy_and_no_chunk_and_the_next_copy_comes(caplog):
    with hosts(2) as (liar, host):
        liar.keep(1, b"abc").map[0:3] = b"xyz"
        liar.offer_to(host)
        wait_until(lambda: "no copy of step 1" in caplog.text)
        assert read(find(liar, b"abc"), b"abc") is None
        liar.keep(2, b"def")
        liar.offer_to(host)
        wait_until(lambda: host.copies_of(0) == [2])
        assert host.budget.taken_bytes == len(b"def{}")


def test_a_copy_that_rots_is_refused_by_its_reader():
    with hosts(2) as (host, following):
        host.keep(1, b"abc")
        host.offer_to(following)
        wait_until(lambda: following.copies_of(0))
        found = find(following, b"abc")
        with following.tier.opened(digest(b"abc")) as (descriptor, chunk):
            writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
            os.pwrite(writable, b"x", chunk.start)
            os.close(writable)
        assert read(found, b"abc") is None
        assert found._found == {}, "it is asked for nothing more"


def test_without_room_for_two_the_older_copy_goes_and_a_rank_of_the_host_comes_before_any(caplog):
    with hosts(2, pages=1) as (host, following):
        for number, body in enumerate((b"a" * 3000, b"b" * 3000), 1):
            host.budget.limit_bytes += PAGE
            host.keep(number, body)
            host.offer_to(following)
            wait_until(lambda number=number: following.copies_of(0) == [number])
        wait_until(lambda: not following.copies._taken._under_way)  # until then the copy's memory is in use
        following.keep(1, b"its own")
        assert following.copies_of(0) == []
        host.offer_to(following)
        wait_until(lambda: "more would be over its limit" in caplog.text)
        assert [state.copy_of for state in following.tier.shown()] == [None]


def test_documents_count_too_whatever_size_another_agent_claims(caplog):
    with hosts(2) as (liar, host):
        liar.keep(1, b"abc")
        liar.part = replace(liar.part, hand=liar.part.hand.model_copy(update={"documents": [200 * PAGE]}))
        liar.offer_to(host)
        wait_until(lambda: "more would be over its limit" in caplog.text)
        assert host.budget.taken_bytes == 0


def test_copies_that_come_too_late_again_and_again_are_told_with_what_helps(caplog):
    with hosts(2) as (host, following):
        for number in (1, 2):
            host.keep(number, b"abc")
            host.tier.forget(RUN, [host.part.memory])
            host.offer_to(following)
            wait_until(lambda number=number: following.copies._too_late.total() == number)
        wait_until(lambda: "--keep" in caplog.text)


def test_an_agent_that_takes_too_long_to_hear_an_offer_does_not_hold_up_those_for_others(monkeypatch):
    asked = []

    def stall(*of):
        asked.append(of)
        raise TimeoutError

    monkeypatch.setattr(copies, "ask", stall)
    with hosts(1) as (host,):
        host.keep(1, b"abc")
        for _ in range(2):
            host.copies._offer((PeerAddress("127.0.0.9", 9, "t"), Offer.model_construct(hand=host.part.hand)))
    assert len(asked) == 1


def test_only_who_knows_the_token_is_answered():
    with hosts(2) as (host, other):
        host.keep(1, b"abc")
        address = host.copies.address
        wrong = PeerAddress(address.host, address.port, other.copies.address.token)
        question = Find(project="p", run="r", digests=[digest(b"abc")])
        assert ask(address, "/find", question) == b'{"bytes":[3]}'
        for path in ("/find", "/offers"):
            with pytest.raises(PeerError, match="403"):
                ask(wrong, path, question)
        buffer = memoryview(bytearray(3))
        assert read_chunk(address, digest(b"abc"), buffer, threading.Event())
        with pytest.raises(PeerError, match="403"):
            read_chunk(wrong, digest(b"abc"), buffer, threading.Event())
        with pytest.raises(PeerError, match="400"):
            ask(address, "/offers", question)


@pytest.mark.parametrize("accepts", [True, False])
def test_an_agent_that_stalls_or_is_gone_is_asked_no_more(accepts, monkeypatch, caplog):
    with socket.socket() as stalled, hosts(1) as (host,):
        stalled.bind(("127.0.0.9", 0))
        if accepts:
            stalled.listen()
        there = PeerAddress(*stalled.getsockname(), "t")
        read_head = peer_http.read_head

        def impatient(connection):
            with monkeypatch.context() as hasty:
                if connection.getpeername() == stalled.getsockname():
                    hasty.setattr(peer_http, "SILENCE_SECONDS", 0.05)
                return read_head(connection)

        monkeypatch.setattr(peer_http, "read_head", impatient)
        host.keep(1, b"abc")
        found = PeerChunks(RUN, [Peer(there, frozenset([0])), Peer(host.copies.address, frozenset([0]))])
        found.find({0: {digest(b"abc")}})
        assert read(found, b"abc") == b"abc"
        assert caplog.text.count("is asked for no more chunks") == 1


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n"])
def test_an_agent_that_sends_a_little_for_ever_is_cut_off_in_a_restore_and_as_the_source_of_a_copy(first, monkeypatch):
    monkeypatch.setattr(peer_http, "SILENCE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.9", 0)) as slow, hosts(1) as (host,):

        def dribble():
            for _ in range(2):
                caller, _ = slow.accept()
                with caller, suppress(OSError):
                    caller.send(first)
                    while True:
                        caller.send(b"H")
                        time.sleep(0.01)

        thread = threading.Thread(target=dribble)
        thread.start()
        address = PeerAddress(*slow.getsockname(), "t")
        found = PeerChunks(RUN, [Peer(address, frozenset([0]))])
        found.find({0: {digest(b"abc")}})
        assert read(found, b"abc") is None
        with pytest.raises(TimeoutError):
            host.copies._fill(memoryview(bytearray(9000)), digest(b"abc"), address)
        thread.join(60)


def test_after_two_agents_that_take_too_long_none_is_asked(monkeypatch):
    asked = []

    def stall(peer, *question):
        asked.append(peer.port)
        if peer.host == "127.0.0.9":
            raise TimeoutError
        return ask(peer, *question)

    monkeypatch.setattr(peer_chunks, "ask", stall)
    with hosts(1) as (host,):
        host.keep(1, b"abc")
        here = host.copies.address
        addresses = [here, *(PeerAddress("127.0.0.9", port, "t") for port in range(3))]
        found = PeerChunks(RUN, [Peer(address, frozenset([0])) for address in addresses])
        found.find({0: {digest(b"abc"), digest(b"else")}})
        assert asked == [here.port, 0, 1]
        assert read(found, b"abc") is None


def test_an_agent_that_many_ask_is_asked_for_the_next_chunk_as_without_a_descriptor_here(monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with hosts(1) as (host,):
        host.keep(1, b"abc")
        found = find(host, b"abc")
        with monkeypatch.context() as many:
            many.setattr(peer_server, "_SENDS_UP_TO", 0)
            assert read(found, b"abc") is None
        with monkeypatch.context() as full:
            full.setattr(socket, "create_connection", refuse)
            assert read(found, b"abc") is None
            assert read(find(host, b"abc"), b"abc") is None
        assert read(found, b"abc") == b"abc"
        assert "no more chunks" not in caplog.text


def test_strangers_that_say_a_little_for_ever_hold_no_place_and_do_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(peer_server, "_MOST_REQUESTS", 2)
    with hosts(1) as (host,):
        host.keep(1, b"abc")
        address = host.copies.address
        with ExitStack() as held:
            with monkeypatch.context() as hasty:
                hasty.setattr(peer_http, "SILENCE_SECONDS", 0.3)
                for _ in range(2):
                    stranger = held.enter_context(socket.create_connection((address.host, address.port)))
                    stranger.settimeout(60)
                    with pytest.raises(OSError, match=r"Broken pipe|reset"):  # noqa: PT012
                        while True:
                            stranger.sendall(b"X")
                            time.sleep(0.01)
            assert read(find(host, b"abc"), b"abc") == b"abc"
            for _ in range(3):  # more than it has places for, and the last one waits in its loop
                held.enter_context(socket.create_connection((address.host, address.port)))
            host.copies.close()


def test_an_address_that_is_not_this_hosts_is_refused_with_what_helps():
    for host in ("192.0.2.1", "10.0.0..1", "0.0.0.0", "::", None):
        with pytest.raises(ConfigurationError, match="HOLDFAST_AGENT_ADDRESS"):
            Copies(MemoryTier(Budget(PAGE), 1), count=1, host=host)
