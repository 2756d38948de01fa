"""A rank's side of the node agent: hands saves over, follows them, and does the work itself once the agent is gone.

    training thread   hand_over() -> Share, HandOver -> Taken: from here on kill -9 loses nothing that is proven
    upload thread     HandedSave.write() -> Run -> Begun, Verified…, Ended
    a thread of ours  reads what the agent says (connection.py); its end is the agent's, and another thread looks for
                      the next agent

The agent's death closes the socket, and is known at once. One that is stopped says nothing, and counts as gone soon:
as it may wake up again and read on, its memory then gets no other save. Training waits for its answer a moment, once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path

from holdfast_client.agent import connection
from holdfast_client.agent import messages as say
from holdfast_client.agent.channel import ChannelClosed, connect
from holdfast_client.agent.connection import AgentRefused, Connection, Events
from holdfast_client.agent.lent_chunks import LentChunks
from holdfast_client.agent.peer_chunks import Peer, PeerChunks
from holdfast_client.agent.shared_memory import SharedMemory, container_room_bytes, gib
from holdfast_client.errors import (
    ConfigurationError,
    HoldfastError,
    ServiceUnavailable,
    TokenProblem,
    TransferStopped,
)
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import CheckpointView, ShardSummary

log = logging.getLogger("holdfast")

FIRST_RETRY_SECONDS, RETRY_SECONDS = 1.0, 60.0
"""Between two looks for an agent: a dead one is started again in seconds, or not soon."""
_LOOK_SECONDS = 0.1


class AgentGone(Exception):  # noqa: N818  (said aloud, it is what happened)
    """The agent is dead, silent, or in trouble of its own: the rank does the work itself."""


class NodeAgent:
    """The agent of this node, as one rank sees it. Thread-safe. Once it was gone, a thread looks for it until it is
    back. Without an agent it does nothing, and the log says so once."""

    def __init__(
        self, path: Path, run: RunName, rank: int, *, host_ranks: int, transfers: int, caller: Callable[[], say.Caller]
    ) -> None:
        """`path`: of the agent's socket. `host_ranks`: ranks of the job on this node. `caller`: asked at each
        connection. Connects to nothing yet. Raises ConfigurationError where there are no such agents."""
        if not hasattr(os, "memfd_create"):
            raise ConfigurationError("A node agent needs Linux. Unset HOLDFAST_AGENT, or leave `agent=` out.")
        self.path = path
        self._run, self._rank = run, rank
        self._host_ranks = host_ranks
        self._transfers = transfers
        self._caller = caller
        self._lock = threading.Lock()
        self._link: Connection | None = None
        self._looking: threading.Thread | None = None
        self._closed = False
        self._over = threading.Event()
        self._said: set[str] = set()
        self._peers: list[Peer] = []
        self._meet: say.Meet | None = None
        ours = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave_to_parent(ours()))

    def hand_over(
        self, memory: SharedMemory, hand: say.HandOver, documents: Sequence[bytes], *, retry_seconds: float
    ) -> HandedSave | None:
        """None: the rank uploads it itself. Else the save survives this process once it is proven, and so does its
        memory. Takes a moment if the agent lives, and at most TRAINING_SECONDS for each of sending and the answer. An
        answer that is still to come is the upload's to wait for. `retry_seconds`: of each of the agent's calls for this
        rank."""
        link = self._link
        if link is None or link.is_lost:
            self._look_for_it()
            return None
        try:
            answers = link.hand_over(memory, hand, documents)
            link.wait_a_moment(memory, answers)
        except AgentRefused as refused:
            self._say(f"{refused}. Until then saves stay in this process.")
            return None
        except TimeoutError:
            self._say("the agent of this node does not answer. Training goes on without its answer.")
        except ChannelClosed as gone:
            memory.may_be_read = True  # it may have taken the save, and its answer is lost
            self._say(f"the agent of this node is gone ({gone}). Saves stay in this process until it is back.")
            return None
        except BaseException:  # such as Ctrl-C: the agent may have taken it
            memory.may_be_read = True
            link.lose()
            raise
        else:
            self._said.clear()
        return HandedSave(link, memory, hand.number, retry_seconds, answers)

    @property
    def keeps(self) -> int:
        """How many states of the run the agent keeps while the next one is staged."""
        link = self._link
        return 0 if link is None or link.is_lost else link.keeps

    def spare_memory(self, size_bytes: int) -> SharedMemory | None:
        """Memory for the next save, so that a kept state stays where it is. None: container, node or agent have no room
        for one more of each rank, and the log says so once; or the agent does not answer. Training waits as in
        `hand_over`."""
        link = self._link
        if link is None or link.is_lost or link.owes:
            return None
        of_all = size_bytes * self._host_ranks
        if not self._make_room(link, of_all, spare=True):
            return None
        room = container_room_bytes()
        if room is not None and room < of_all:
            link.keep_less(f"this container's memory limit leaves {gib(room)}, and {gib(of_all)} more would be staged")
            return None
        try:
            memory = SharedMemory(size_bytes)
        except (OSError, MemoryError) as error:
            link.keep_less(str(error))
            return None
        try:
            link.share_spare(memory)
            return memory
        except AgentRefused as refused:
            link.keep_less(str(refused))
        except (TimeoutError, ChannelClosed) as gone:
            log.debug("no spare memory: %s", gone)  # the hand-over says so
        except BaseException:
            memory.close()
            raise
        memory.close()
        return None

    def make_room(self, size_bytes: int) -> None:
        """Before staging memory is made: if this container's memory limit has no room for it on all ranks, the agent
        lets go of copies and of states that ended launches have left, for which the container may still pay. Training
        waits as in `hand_over`."""
        link = self._link
        if link is not None and not (link.is_lost or link.owes):
            self._make_room(link, size_bytes * self._host_ranks, spare=False)

    def _make_room(self, link: Connection, of_all: int, *, spare: bool) -> bool:
        """False: the agent does not answer."""
        try:
            while (room := container_room_bytes()) is not None and room < of_all:
                link.make_room(spare=spare)
        except AgentRefused:  # nothing is left
            return True
        except (ChannelClosed, TimeoutError):
            return False
        return True

    def keep_less(self, why: str) -> None:
        """No more spare memory, for this reason."""
        if (link := self._link) is not None:
            link.keep_less(why)

    def reclaim(self, memory: SharedMemory) -> None:
        """The next save is staged into it: the agent keeps nothing in it any longer. One that cannot be told may do so
        all the same, and no other save may come into it."""
        memory.is_kept = False
        try:
            if (link := self._link) is None:
                raise ChannelClosed
            link.reclaim(memory)
        except ChannelClosed:
            memory.may_be_read = True

    def borrow(self) -> LentChunks | None:
        """What the agent keeps of the run; the caller closes it. None without an agent."""
        link = self._link
        if link is None or link.is_lost:
            return None
        try:
            return LentChunks(link.borrow())
        except (AgentRefused, ChannelClosed) as gone:
            self._say(f"the agent of this node is gone ({gone}). Saves stay in this process until it is back.")
            return None

    def of_other_hosts(self) -> PeerChunks | None:
        """What the agents of the job's other hosts keep of the run, for one restore. None if they have told of none."""
        return PeerChunks(self._run, self._peers) if self._peers else None

    def settle(self, seconds: float) -> None:
        """Waits until no save that a dead rank of this run has left to the agent can still be cut off by a new attempt.
        At most so many seconds; the log then says so. Connects first."""
        if not self._has_link:
            self._connect()
        link = self._link
        if link is None or link.is_lost:
            self._look_for_it()
            return
        try:
            link.settle(seconds)
        except TimeoutError:
            log.warning(
                "the agent of this node is still sending saves that an earlier launch has left to it. The new attempt "
                "does not wait any longer, and they are given up"
            )
        except ChannelClosed as gone:
            self._say(f"the agent of this node is gone ({gone}). Saves stay in this process until it is back.")

    def here(self) -> say.PeerHere | None:
        """Where the agents of the job's other hosts reach this one, and what it has. None without an agent."""
        link = self._link
        if link is None or link.is_lost:
            return None
        try:
            return link.here()
        except (AgentRefused, ChannelClosed) as gone:
            self._say(f"the agent of this node is gone ({gone}). Saves stay in this process until it is back.")
            return None

    def meet(self, host: int, others: Sequence[say.PeerHere]) -> None:
        """`host`: the lowest rank on this one. `others`: of the job's other hosts, the next one's first."""
        self._peers = [Peer(other.address, frozenset(other.ranks)) for other in others if other.address is not None]
        self._meet = say.Meet(host=host, others=[peer.address for peer in self._peers]) if self._peers else None
        self._introduce(self._link)

    def _introduce(self, link: Connection | None) -> None:
        if link is not None and self._meet is not None:
            with contextlib.suppress(ChannelClosed):
                link.channel.send(self._meet)

    def close(self, *, is_finished: bool) -> None:
        """The job ends: what the agent still holds of it, and was not left to it, is given up. `is_finished`: no
        relaunch is to come, and no state is kept for it. May be called twice."""
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
        self._over.set()
        if link is not None:
            link.close(is_finished=is_finished)

    def leave_to_parent(self) -> None:
        """In a forked child, which must neither speak for its parent nor hold its connection open."""
        self._closed = True  # and no lock: another thread may have held it at the fork
        link, self._link = self._link, None
        if link is not None:
            link.channel.leave_to_parent()

    def _look_for_it(self) -> None:
        """On a thread of its own, until there is one: neither training nor an upload waits for an agent that hangs."""
        with self._lock:
            if self._closed or (self._looking is not None and self._looking.is_alive()):
                return
            self._looking = threading.Thread(target=self._look, name="holdfast-agent-look", daemon=True)
            with contextlib.suppress(RuntimeError):  # the system gives none, or the interpreter ends
                self._looking.start()

    @property
    def _has_link(self) -> bool:
        link = self._link
        return link is not None and not link.is_lost

    def _look(self) -> None:
        pause = FIRST_RETRY_SECONDS
        while not (self._closed or self._has_link):
            self._connect()
            if not self._has_link:
                self._over.wait(min(pause, RETRY_SECONDS))
                pause *= 2

    def _connect(self) -> None:
        try:
            link = Connection(connect(self.path, connection.ANSWER_SECONDS), on_lost=self._look_for_it)
        except (OSError, HoldfastError) as error:
            self._say_none(error)
            return
        try:
            hello = say.Hello(
                version=say.VERSION,
                holdfast=version("holdfast"),
                project=self._run.project,
                run=self._run.run,
                rank=self._rank,
                host_ranks=self._host_ranks,
                transfers=self._transfers,
                caller=self._caller(),
            )
            link.greet(hello)
        except AgentRefused as refused:
            self._say(f"{refused}. Until then saves stay in this process.")
        except (OSError, HoldfastError) as error:
            self._say_none(error)
        else:
            with self._lock:
                is_ours = not (self._closed or self._has_link)
                if is_ours:
                    self._link = link
            if is_ours:
                self._introduce(link)  # not under the lock: an agent that hangs takes nothing, and training wants it
                return
        link.lose()

    def _say_none(self, why: object) -> None:
        self._say(
            f"no agent answers at {self.path} ({why}). Saves stay in this process until one does: start it with "
            "`holdfast agent serve`."
        )

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("%s", what[0].upper() + what[1:])


def _leave_to_parent(agent: NodeAgent | None) -> None:
    if agent is not None:
        agent.leave_to_parent()


class HandedSave:
    """One save that the agent has taken. `write` on the upload thread, `release` on the last that uses the memory."""

    def __init__(
        self,
        link: Connection,
        memory: SharedMemory,
        number: int,
        retry_seconds: float,
        answers: Sequence[Future[say.Told]] = (),
    ) -> None:
        """`answers`: of the hand-over, maybe still to come."""
        self._link = link
        self._memory = memory
        self._answers = answers
        self._number = number
        self._retry_seconds = retry_seconds
        self._ending = threading.Lock()
        self._is_released = False
        self.is_left = False
        """The agent finishes it, though this process ends by itself."""

    @property
    def is_with_agent(self) -> bool:
        return not (self._link.is_lost or self._is_released)

    def leave(self) -> None:
        """At the end of the job, from any thread: the agent goes on as if the rank were dead, and `write` ends with
        TransferStopped. The save is proven. Nothing if the agent does not have the save any more, or has not said that
        it does."""
        with self._ending:
            if self.is_with_agent and self._is_taken():
                self.is_left = self._link.leaves = True

    def prove(self) -> None:
        """Nothing has written, or will write, to what the save was copied from: from here on it survives this process.
        From any thread, at any time."""
        with contextlib.suppress(ChannelClosed):  # it is gone, and `write` hears of that
            if self.is_with_agent:
                self._link.channel.send(say.Proven(number=self._number), seconds=connection.TRAINING_SECONDS)

    def write(self, writer: ShardWriter, told: Callable[[], ShardSummary]) -> CheckpointView:
        """One try of the agent's, as if `writer` had made it: its callbacks are called, its figures are set, and its
        `stop` stops the agent's. `told` is asked now, and again before each seal of a save that is not proven; what
        it raises ends the try. Raises what the agent's try has raised, what `told` and `writer.on_begun` raise, and
        AgentGone if the rank must do it."""
        events = self._link.follow(self._number)
        try:
            self._wait_until_taken(writer)
            self._link.channel.send(say.Run(number=self._number, summary=told(), retry_seconds=self._retry_seconds))
            return self._followed(events, writer, told)
        except (ChannelClosed, AgentRefused) as gone:
            raise AgentGone(str(gone)) from gone
        finally:
            if self._link.is_lost:
                self._memory.may_be_read = True
            self._link.unfollow(self._number)

    def _is_taken(self) -> bool:
        try:
            self._link.wait_until_taken(self._memory, self._answers, 0)
        except (TimeoutError, ChannelClosed, AgentRefused):
            return False
        return True

    def _wait_until_taken(self, writer: ShardWriter) -> None:
        until = time.monotonic() + connection.ANSWER_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                self._link.wait_until_taken(self._memory, self._answers, _LOOK_SECONDS)
                return
            if writer.is_stopped:
                raise TransferStopped("The save was given up before the agent of this node had answered")
            if time.monotonic() > until:
                self._link.lose()
                raise ChannelClosed(f"it has not answered for {connection.ANSWER_SECONDS:.0f} s")

    def release(self, digests: Sequence[str] = ()) -> None:
        """The memory is for another save, unless the agent may still read it. With `digests`, of its chunks and
        documents, the agent keeps the state until another save is staged there; not if it has not said that it has the
        save: nobody would reclaim that memory. May be called twice."""
        with self._ending:
            if self._is_released or self.is_left:
                return
            self._is_released = True
        kept = list(digests) if self._is_taken() else []
        try:
            if self._link.is_lost:
                raise ChannelClosed
            released = say.Release(number=self._number, digests=kept)
            self._link.channel.send(released, seconds=connection.TRAINING_SECONDS)  # the next save waits for this
            self._memory.is_kept = bool(kept)
        except ChannelClosed:
            self._memory.may_be_read = True

    def _followed(self, events: Events, writer: ShardWriter, told_now: Callable[[], ShardSummary]) -> CheckpointView:
        refused: BaseException | None = None
        is_told = False
        while True:
            # Looked at first: the end of the job leaves the save, and then stops the writer.
            is_stopped = writer.is_stopped
            if self.is_left:
                raise TransferStopped("This job ended, and the agent of its node goes on with the save")
            if not is_told and (is_stopped or refused is not None):
                self._link.channel.send(say.Stop(number=self._number))
                is_told = True
            try:
                told = events.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                self._link.lose_if_silent()
                continue
            match told:
                case None:
                    raise AgentGone("it has ended")
                case say.Begun():
                    try:
                        writer.begun_elsewhere(told.view)
                    except BaseException as error:  # raised once the agent's threads have let go of the memory
                        refused = error
                case say.Verified():
                    if writer.on_verified is not None:
                        writer.on_verified(told.bytes)
                case say.Sealing():
                    try:
                        told_now()
                    except BaseException as error:
                        refused = error
                    else:
                        self._link.channel.send(say.MaySeal(number=self._number))
                case say.Ended():
                    if refused is not None:
                        raise refused
                    try:
                        return _outcome(told, writer)
                    except (TokenProblem, ConfigurationError, ServiceUnavailable) as error:
                        writer.begin_failed = False  # its own begin may go well
                        if not isinstance(error, ServiceUnavailable):
                            self._link.lose()  # the next connection tells the agent how this rank calls now
                        raise AgentGone(f"it cannot call as this process may: {error}") from error


def _outcome(ended: say.Ended, writer: ShardWriter) -> CheckpointView:
    writer.begin_failed = ended.begin_failed
    if ended.view is not None:
        writer.digests = list(ended.digests)
        writer.sent_bytes, writer.sent_chunk_bytes = ended.sent_bytes, ended.sent_chunk_bytes
        return ended.view
    error = None if ended.failure is None else ended.failure.error()
    raise error or AgentGone("it has trouble of its own; its log says more")


def status_of(path: Path) -> say.Status:
    """What the agent at `path` says of itself. Raises ConfigurationError if none serves there, and ServiceUnavailable
    for one that does not answer, or is of another version."""
    try:
        link = Connection(connect(path, connection.ANSWER_SECONDS))
    except OSError as error:
        raise ConfigurationError(
            f"No agent serves at {path} ({error}). Start one with `holdfast agent serve`, or name its socket "
            "(--socket)."
        ) from error
    try:
        told = link.ask(say.Report()).result(connection.ANSWER_SECONDS)
    except OSError as error:
        raise ServiceUnavailable(
            f"The agent at {path} does not answer ({error or 'it is stopped, or hangs'}). Look at its log, and start "
            "it again."
        ) from error
    finally:
        link.close()
    if not isinstance(told, say.Status):
        raise ServiceUnavailable(f"The agent at {path} is of another version. Ask it with its own `holdfast`.")
    return told
