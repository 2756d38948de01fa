"""Which states the node agent keeps in memory, and whom they make room for; and what a restore makes of them."""

from __future__ import annotations

import hashlib
import os
import threading

import pytest

from holdfast_client.agent import memory_tier, shared_memory
from holdfast_client.agent.lent_chunks import LentChunks
from holdfast_client.agent.memory_tier import Memory, MemoryTier, NoRoom, Part
from holdfast_client.agent.messages import Caller, HandOver, Hello, Lent, Share, StagedChunk
from holdfast_client.agent.shared_memory import Budget, SharedMemory
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import IndexOrdinals, ShardSummary
from holdfast_protocol.states import CheckpointKind

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="agents need Linux")
PAGE = 4096
RUN = RunName("p", "r")


class Node:
    """A tier with room for `pages`, and the ranks of its node."""

    def __init__(self, pages=100, *, states=1, ranks=1):
        self.budget = Budget(pages * PAGE)
        self.tier = MemoryTier(self.budget, states)
        self.ranks = ranks

    @property
    def pages(self):
        return self.budget.taken_bytes // PAGE

    def memory(self, *, spare=False, run=RUN, **how):
        """One page that a rank of the run has shared."""
        hello = Hello(
            version=1,
            holdfast="1",
            project=run.project,
            run=run.run,
            rank=0,
            host_ranks=self.ranks,
            transfers=1,
            caller=Caller(settings={}, token=None),
        )
        theirs = SharedMemory(PAGE)
        try:
            return self.tier.take(hello, Share(memory=theirs.id, bytes=PAGE, spare=spare), theirs.descriptor, **how)
        finally:
            theirs.close()

    def hand(self, number, *, rank=0, attempt=1, run=RUN, launch_id="a" * 8):
        return HandOver(
            project=run.project,
            run=run.run,
            epoch=1,
            attempt=attempt,
            launch_id=launch_id,
            number=number,
            step=number,
            kind=CheckpointKind.PERIODIC,
            world_size=self.ranks,
            rank=rank,
            memory=1,
            chunks=[],
            documents=[2],
            index=IndexOrdinals(shard=0, layout=None),
            summary=ShardSummary(components={}),
            retry_seconds=0,
        )

    def keep(self, memory, number, *, launch=1, **of):
        self.tier.keep(Part(self.hand(number, **of), self.ranks, memory, ["d" * 64], [b"{}"], launch))

    def copy(self, number, *, host=1, pages=1, launch_id="a" * 8, is_safe=True):
        """A copy of a part of that host. Its hand-over."""
        hand, own = self.hand(number, launch_id=launch_id), SharedMemory(pages * PAGE)
        try:
            memory = self.tier.take_copy(hand, host, own, is_safe=is_safe)
            part = Part(hand, 1, memory, ["d" * 64], [b"{}"], self.tier.launch_of(launch_id), host)
            (self.tier.keep if is_safe else self.tier.hold)(part)
            self.tier.let_go(memory)
        finally:
            own.close()
        return hand

    @property
    def copies(self):
        return [(state.copy_of, state.step) for state in self.tier.shown() if state.copy_of is not None]

    @property
    def held(self):
        """Steps of copies that are not committed."""
        return [state.step for state in self.tier.shown() if not state.is_committed]

    def kept(self, run=RUN):
        with self.tier.lending(run, ()) as lent:
            return [(part.hand.attempt, part.hand.number, part.hand.rank) for part, _ in lent]


def test_a_state_goes_when_the_next_one_is_whole_for_all_ranks_of_the_node():
    node = Node(ranks=2)
    for rank in range(2):
        node.keep(node.memory(), 1, rank=rank)
    node.keep(node.memory(), 2, rank=1)
    assert node.kept() == [(1, 1, 0), (1, 1, 1), (1, 2, 1)]
    node.keep(node.memory(), 2, rank=0)
    assert node.kept() == [(1, 2, 1), (1, 2, 0)]


def test_more_states_stay_if_they_are_asked_for():
    node = Node(states=2)
    for number in range(1, 5):
        node.keep(node.memory(), number)
    assert node.kept() == [(1, 3, 0), (1, 4, 0)]


def test_states_that_are_never_whole_do_not_pile_up():
    node = Node(ranks=2)
    for number in range(1, 6):
        node.keep(node.memory(), number)
    assert node.kept() == [(1, 4, 0), (1, 5, 0)]


def test_a_later_launchs_state_counts_as_the_newer_one_also_if_its_catalog_was_made_anew():
    node = Node()
    node.keep(node.memory(), 7, attempt=5, launch=1)
    node.keep(node.memory(), 1, attempt=1, launch=2)
    assert node.kept() == [(1, 1, 0)]
    node.keep(node.memory(), 8, attempt=5, launch=1)
    assert node.kept() == [(1, 1, 0)], "finished late for a rank that is gone"


def test_a_state_is_gone_when_its_rank_stages_the_next_one_there():
    node = Node()
    memory = node.memory()
    node.keep(memory, 1)
    node.tier.reclaim(memory)
    assert (node.kept(), node.pages) == ([], 1)


def test_memory_is_given_back_when_no_rank_and_no_kept_state_needs_it():
    node = Node()
    first, second = node.memory(), node.memory(spare=True)
    node.keep(first, 1)
    node.tier.let_go(first)
    assert (node.pages, first.is_closed) == (2, False)
    node.keep(second, 2)
    assert (node.pages, first.is_closed) == (1, True)
    node.tier.let_go(second)
    assert node.kept() == [(1, 2, 0)]
    node.tier.forget(RUN)
    assert (node.kept(), node.pages, second.is_closed) == ([], 0, True)


def test_a_launch_that_has_done_its_work_forgets_what_is_left_and_its_own_and_no_other_launchs():
    node = Node(ranks=3)
    left, own, others = node.memory(), node.memory(), node.memory()
    for rank, memory in enumerate((left, own, others)):
        node.keep(memory, 1, rank=rank)
    node.tier.let_go(left)
    node.tier.forget(RUN, [own])
    assert node.kept() == [(1, 1, 2)]
    node.tier.forget(RUN, [others])
    assert node.kept() == []


def test_states_of_launches_that_have_ended_make_room_and_those_of_living_ones_do_not():
    node, other = Node(3), RunName("p", "other")
    left, living = node.memory(), node.memory(run=other)
    node.keep(living, 1, run=other)
    node.keep(left, 1)
    node.tier.let_go(left)
    node.memory(run=other)
    assert node.kept() == [(1, 1, 0)]
    node.memory(run=other)
    assert node.kept() == []
    with pytest.raises(NoRoom, match="--memory"):
        node.memory(run=other)
    assert node.kept(other) == [(1, 1, 0)]


@pytest.mark.parametrize(("where", "name"), [(shared_memory, "available_bytes"), (memory_tier, "container_room_bytes")])
def test_two_copies_and_a_slab_for_the_next_save_are_not_promised_the_same_free_memory(monkeypatch, where, name):
    monkeypatch.setattr(where, name, lambda: 3 * PAGE)
    node, arriving = Node(), SharedMemory(2 * PAGE)
    memory = node.tier.take_copy(node.hand(1), 1, arriving)
    with pytest.raises(NoRoom):
        node.copy(1, host=2, pages=2)
    node.memory(spare=True, pays_here=True)
    with pytest.raises(NoRoom):
        node.memory(spare=True, pays_here=True)
    with pytest.raises(NoRoom):
        node.copy(1, host=2)
    node.memory()  # a save is in it already
    arriving.map[:] = bytes(2 * PAGE)
    node.copy(1, host=2)
    node.tier.let_go(memory)
    arriving.close()


def test_copies_of_an_earlier_launch_go_whichever_hosts_they_are_of_because_ranks_have_other_numbers_now():
    node = Node()
    node.copy(7, host=8)
    node.copy(7, host=16)
    node.copy(1, host=0, launch_id="b" * 8)
    assert node.copies == [(0, 1)]
    node = Node(2)
    node.copy(7, host=8, pages=2)
    node.copy(1, host=0, pages=2, launch_id="b" * 8)
    assert node.copies == [(0, 1)], "also where there was no room for it"
    node = Node()
    for number in (2, 1):
        node.copy(number)
    assert node.copies == [(1, 2)], "one that comes late is none"


def test_in_one_container_copies_make_room_and_for_a_slab_more_they_alone():
    node = Node()
    left = node.memory()
    node.keep(left, 1)
    node.tier.let_go(left)
    node.copy(1)
    assert not node.tier.make_room(RUN, states=False, copies=False)
    assert [node.tier.make_room(RUN, states=False, copies=True) for _ in range(2)] == [True, False]
    assert [state.copy_of for state in node.tier.shown()] == [None]
    node.copy(1)
    assert node.tier.make_room(RUN, copies=False)
    assert [state.copy_of for state in node.tier.shown()] == [1]


def test_a_copy_that_comes_after_its_job_has_finished_is_not_kept():
    node = Node()
    node.tier.finish(node.tier.launch_of("a" * 8))
    node.copy(1)
    assert (node.copies, node.pages) == ([], 0)
    node.copy(1, launch_id="b" * 8)
    assert node.copies == [(1, 1)]


def test_a_copy_stays_if_a_newer_one_has_no_room_without_it_either():
    node = Node(3)
    node.memory()
    node.copy(1)
    with pytest.raises(NoRoom):
        node.copy(2, pages=3)
    assert node.copies == [(1, 1)]
    node.copy(2, pages=2)
    assert node.copies == [(1, 2)]


def test_a_copy_of_a_save_that_is_not_committed_is_there_beside_the_kept_one_until_it_is():
    node = Node()
    node.copy(1)
    node.copy(2, is_safe=False)
    hand = node.copy(3, is_safe=False)
    assert (node.copies, node.held) == ([(1, 1), (1, 3)], [3])
    assert node.pages == 2
    assert not node.tier.confirm(hand, 1, ["e" * 64]), "other bytes"
    assert not node.tier.confirm(hand, 2, ["d" * 64]), "another host's"
    assert node.tier.confirm(hand, 1, ["d" * 64])
    assert (node.copies, node.held) == ([(1, 3)], [])
    assert node.pages == 1
    assert not node.tier.confirm(hand, 1, ["d" * 64])


def test_a_copy_that_is_kept_ends_those_of_older_saves_that_were_never_committed():
    node = Node()
    node.copy(1, is_safe=False)
    node.copy(2)
    assert (node.copies, node.held) == ([(1, 2)], [])
    [left] = [node.copy(3, is_safe=False)]
    [part] = node.tier.unfinished(RUN)
    assert part.hand == left
    node.tier.give_up(part)
    assert (node.copies, node.pages) == ([(1, 2)], 1)


def test_what_is_not_committed_takes_no_room_from_what_is_and_goes_first_when_ranks_need_it():
    node = Node(2)
    node.copy(1)
    node.copy(2, is_safe=False)
    with pytest.raises(NoRoom):
        node.copy(3, pages=2, is_safe=False)
    assert (node.copies, node.held) == ([(1, 1), (1, 2)], [2])
    node.copy(4, is_safe=False)
    assert (node.copies, node.held) == ([(1, 1), (1, 4)], [4])
    node.memory()
    assert (node.copies, node.held) == ([(1, 1)], [])


def test_a_save_of_this_node_can_be_copied_until_its_rank_is_done_with_it():
    node = Node()
    memory = node.memory()
    part = Part(node.hand(1), 1, memory, ["d" * 64], [b"{}"], 1)

    def is_there():
        with node.tier.opened("d" * 64) as found:
            return found is not None

    for end in (node.tier.release, node.tier.reclaim, node.tier.let_go):
        assert node.tier.hold(part)
        assert is_there()
        assert node.kept() == [], "a restore would take it for committed"
        end(memory)
        assert not is_there()
    assert node.pages == 0


def test_copies_of_unfinished_saves_are_forgotten_with_their_run_and_not_taken_after_its_end():
    node = Node()
    node.copy(1, is_safe=False)
    node.tier.finish(node.tier.launch_of("a" * 8))
    node.tier.forget(RUN)
    assert (node.copies, node.pages) == ([], 0)
    node.copy(2, is_safe=False)
    assert (node.copies, node.pages) == ([], 0)


def test_memory_is_freed_without_the_lock_and_counts_until_then(monkeypatch):
    node, close, seen = Node(), Memory.close, []
    monkeypatch.setattr(Memory, "close", lambda it: (seen.append((node.tier._lock.locked(), node.pages)), close(it)))
    first = node.memory()
    node.keep(first, 1)
    node.tier.let_go(first)
    node.keep(node.memory(), 2)
    assert (seen, node.pages) == ([(False, 2)], 1)


def test_all_ranks_of_a_node_have_one_more_or_none():
    node = Node(5, ranks=3)
    for _ in range(3):
        node.memory()
    for _ in range(3):
        with pytest.raises(NoRoom, match="--memory"):
            node.memory(spare=True)
    assert node.pages == 3
    node = Node(6, ranks=3)
    for _ in range(3):
        node.memory()
    for _ in range(3):
        node.memory(spare=True)
    assert node.pages == 6


def test_a_run_without_a_launch_is_forgotten_after_a_while_and_a_launch_that_comes_in_time_finds_it(monkeypatch):
    monkeypatch.setattr(memory_tier, "IDLE_SECONDS", 3600)
    node, forgotten = Node(), threading.Event()
    forget = node.tier.forget
    monkeypatch.setattr(node.tier, "forget", lambda run: (forget(run), forgotten.set()))
    node.tier.join(RUN)
    memory = node.memory()
    node.keep(memory, 1)
    node.tier.let_go(memory)
    node.tier.leave(RUN)
    timer = node.tier._idle[RUN]
    node.tier.join(RUN)
    timer.join(60)
    assert node.kept() == [(1, 1, 0)]
    monkeypatch.setattr(memory_tier, "IDLE_SECONDS", 0)
    node.tier.leave(RUN)
    assert forgotten.wait(60)
    assert (node.kept(), node.pages) == ([], 0)


def test_without_a_free_descriptor_a_restore_gets_what_there_is_and_nothing_stays_open(monkeypatch):
    node, dup, made = Node(ranks=2), os.dup, []

    def of_few(descriptor):
        if made:
            raise OSError(24, "Too many open files")
        made.append(dup(descriptor))
        return made[0]

    for rank in range(2):
        node.keep(node.memory(), 1, rank=rank)
    monkeypatch.setattr(os, "dup", of_few)
    assert node.kept() == [(1, 1, 0)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


def lent(body, *ranges, documents=()):
    """LentChunks of one memory with this content, and of documents; and the memory."""
    memory = SharedMemory(max(PAGE, len(body)))
    memory.map[: len(body)] = body
    start, told = 0, []
    for document in documents:
        told.append(StagedChunk(start=start, bytes=len(document), digest=digest(document)))
        start += len(document)
    chunks = [StagedChunk(start=begin, bytes=end - begin, digest=digest(body[begin:end])) for begin, end in ranges]
    part = Lent(chunks=chunks, documents=told)
    return LentChunks([(part, b"".join(documents), os.dup(memory.descriptor))]), memory


def digest(body):
    return hashlib.sha256(body).hexdigest()


def read(chunks, body):
    """The bytes that are found under the digest of `body`."""
    buffer = bytearray(len(body))
    return bytes(buffer) if chunks.read_into(digest(body), memoryview(buffer), threading.Event()) else None


def test_chunks_and_documents_are_read_and_others_are_not_there():
    chunks, memory = lent(b"abcdefgh", (0, 3), (3, 8), documents=(b"one", b"another"))
    for body in (b"abc", b"defgh", b"one", b"another"):
        assert (chunks.size(digest(body)), read(chunks, body)) == (len(body), body)
    assert (chunks.size(digest(b"x")), read(chunks, b"x")) == (None, None)
    memory.close()
    assert read(chunks, b"abc") == b"abc", "also when its process has let it go"
    chunks.close()
    chunks.close()


def test_other_bytes_than_the_digest_says_are_not_there_and_the_log_says_so(caplog):
    chunks, memory = lent(b"abcdefgh", (0, 3), (3, 8))
    memory.map[1:2] = b"B"
    assert read(chunks, b"abc") is None
    assert chunks.size(digest(b"abc")) is None
    assert read(chunks, b"defgh") == b"defgh"
    assert "other bytes for chunk" in caplog.text
    memory.close()
    chunks.close()


def test_a_whole_state_that_is_staged_over_is_no_flood_in_the_log(caplog):
    chunks, memory = lent(b"abcdefgh", (0, 3), (3, 8), (1, 5))
    memory.map[:8] = bytes(8)
    assert [read(chunks, body) for body in (b"abc", b"defgh", b"bcde")] == [None] * 3
    memory.close()
    chunks.close()
    chunks.close()
    assert (caplog.text.count("other bytes for chunk"), caplog.text.count("3 chunks")) == (1, 1)


def test_a_range_behind_the_end_of_the_memory_is_not_there():
    memory = SharedMemory(PAGE)
    part = Lent(chunks=[StagedChunk(start=PAGE - 1, bytes=3, digest=digest(b"abc"))], documents=[])
    chunks = LentChunks([(part, b"", os.dup(memory.descriptor))])
    assert read(chunks, b"abc") is None
    memory.close()
    chunks.close()
