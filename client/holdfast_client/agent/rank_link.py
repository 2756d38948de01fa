"""One rank's connection in the agent: its hand-overs, and its saves until they are over, also after its death.

a thread reads the rank's frames, and answers at once
a thread does the rank's work, one save after another; after the rank's death, what it has left
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from holdfast_client.agent import messages as say
from holdfast_client.agent.channel import Channel, ChannelClosed
from holdfast_client.agent.held_save import HeldSave, JobHere, RankClient
from holdfast_client.agent.memory_tier import Memory, NoRoom, Part
from holdfast_client.agent.shared_memory import UnusableMemory, shares_container
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError
from holdfast_client.settings import ClientSettings
from holdfast_protocol.base import RunName

if TYPE_CHECKING:
    from holdfast_client.agent.server import Agent

log = logging.getLogger("holdfast.agent")

ALIVE_SECONDS = 2.0
_LOOK_SECONDS = 0.1


@dataclass
class _Rank:
    """What a rank has said of itself."""

    hello: say.Hello
    settings: ClientSettings
    client: RankClient
    workers: TransferWorkers
    memories: dict[int, Memory] = field(default_factory=dict)


class _Refusal(Exception):  # noqa: N818
    """A reason for the rank; it goes on by itself."""


class RankLink:
    """One rank's connection, and its saves until they are over. `_saves` is the reading thread's and the working one's,
    under the lock."""

    def __init__(self, agent: Agent, channel: Channel) -> None:
        self._agent = agent
        self._channel = channel
        self._lock = threading.Lock()
        self._rank: _Rank | None = None
        self._saves: dict[int, HeldSave] = {}
        self._job: JobHere | None = None
        self._launch: int | None = None
        self._met: say.Meet | None = None
        self._waits = threading.Event()
        """The rank waits for something that takes its time."""
        self._over = threading.Event()
        self.is_dead = False
        """Its rank is gone without a word, and has left its saves."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"holdfast-agent-{name}", daemon=True)
            for target, name in ((self._do, "work"), (self._say_alive, "alive"), (self._read, "read"))
        ]

    @property
    def run(self) -> RunName | None:
        return None if self._rank is None else RunName(self._rank.hello.project, self._rank.hello.run)

    @property
    def is_hung_up(self) -> bool:
        return self._channel.is_hung_up()

    @property
    def rank_lives(self) -> bool:
        return self._channel.peer_lives

    def start(self) -> None:
        """Raises RuntimeError if the system gives no thread."""
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self._over.set()
            self._work.put(None)
            raise

    def unsealed(self) -> list[HeldSave]:
        with self._lock:
            return [save for save in self._saves.values() if not (save.is_sealed or save.is_over)]

    def held(self) -> list[say.HeldPart]:
        with self._lock:
            return [save.shown(rank_lives=not self.is_dead) for save in self._saves.values()]

    def sealed(self) -> list[Part]:
        with self._lock:
            saves = [save for save in self._saves.values() if save.is_sealed]
        return [part for save in saves if (part := self._part(save, save.digests)) is not None]

    def leave_to_rank(self) -> None:
        """The agent ends: a living rank does its work itself from here on. The agent does it too, as for a dead one:
        the end of a node may come to the agent first, and a large process takes seconds to die."""
        self._channel.shut()

    # The reading thread.

    def _read(self) -> None:
        says_bye = False
        try:
            while not says_bye:
                text, body, descriptor = self._channel.receive()
                try:
                    says_bye = self._take(say.ASKED.validate_json(text), body, descriptor)
                finally:
                    if descriptor is not None:
                        os.close(descriptor)
        except ChannelClosed as error:
            log.debug("a rank has left: %s", error)
        except ValidationError as error:
            log.warning("a rank says what this version does not know: %s", error.errors()[0]["msg"])
            self._tell(say.Refused(reason=_of_other_versions("holdfast")))
        except BaseException:
            log.exception("a rank's connection ends")
        finally:
            self._end(is_dead=not says_bye)
            self._work.put(None)  # last: no frame of this thread holds a save any more
        if self.is_dead and self.run is not None and self._agent.all_are_dead(self.run):
            self._begin_for_lost_hosts()

    def _end(self, *, is_dead: bool) -> None:
        with self._lock:
            self.is_dead = is_dead
            saves = [*self._saves.values()]
        if is_dead and (proven := [save for save in saves if save.hand.is_proven]):
            log.warning("a rank is gone, and its saves are finished here: %s", "; ".join(map(str, proven)))
        for save in saves:
            if is_dead and not save.hand.is_proven:
                save.stop()  # a try would wait for the rank's word
            if is_dead:
                self._work.put(functools.partial(self._finish, save))
            else:
                save.stop()

    def _take(self, asked: say.Asked, body: bytes, descriptor: int | None) -> bool:
        """Whether it was the last frame. Raises ChannelClosed, which ends the connection."""
        match asked:
            case say.Hello():
                self._answer(lambda: self._greet(asked), self._welcome())
            case say.Share():
                self._answer(lambda: self._share(asked, descriptor))
            case say.Forget():
                self._forget(asked.memory)
            case say.HandOver():
                self._answer(lambda: self._hold(asked, body))
            case say.Run():
                self._waits.set()
                self._work.put(lambda: self._run(asked))
            case say.Proven():
                if (save := self._saves.get(asked.number)) is not None:
                    save.prove()
                    self._offer_handed(save)
            case say.MaySeal():
                if (save := self._saves.get(asked.number)) is not None:
                    save.allow_seal()
            case say.Stop():
                if (save := self._saves.get(asked.number)) is not None:
                    save.stop()
            case say.Release():
                self._release(asked)
            case say.Reclaim():
                if self._rank is not None and (memory := self._rank.memories.get(asked.memory)) is not None:
                    self._agent.tier.reclaim(memory)
            case say.MakeRoom():
                self._answer(lambda: self._make_room(asked))
            case say.Borrow():
                self._lend()
            case say.Here():
                self._channel.send(self._here())
            case say.Meet():
                self._met = asked
                if self.run is not None and self._agent.copies is not None:
                    self._agent.copies.meet(self.run, asked.others)
            case say.Settle():
                self._waits.set()
                self._work.put(self._settle)
            case say.Report():
                self._channel.send(self._agent.status())
            case say.Bye():
                if asked.is_finished and self._rank is not None and self.run is not None:
                    if self._launch is not None:
                        self._agent.tier.finish(self._launch)
                    self._agent.tier.forget(self.run, self._rank.memories.values())
                return True
        return False

    def _answer(self, work: Callable[[], None], taken: BaseModel | None = None) -> None:
        try:
            work()
        except _Refusal as refusal:
            self._channel.send(say.Refused(reason=str(refusal)))
        else:
            self._channel.send(taken or say.Taken())

    def _greet(self, hello: say.Hello) -> None:
        if hello.version != say.VERSION:
            raise _Refusal(_of_other_versions(f"holdfast {hello.holdfast}"))
        try:
            client = Client(hello.caller.client_settings())
        except (HoldfastError, ValidationError) as error:
            raise _Refusal(f"the agent cannot call the service as this job does: {error}") from error
        self._rank = _Rank(hello, client.settings, RankClient(client), TransferWorkers(hello.transfers))
        self._agent.tier.join(RunName(hello.project, hello.run))

    def _welcome(self) -> say.Welcome:
        return say.Welcome(version=say.VERSION, holdfast=version("holdfast"), keeps=self._agent.tier.states)

    def _share(self, share: say.Share, descriptor: int | None) -> None:
        if self._rank is None or descriptor is None:
            raise ChannelClosed("a rank shares nothing")
        if share.memory in self._rank.memories:
            return  # the rank has given up the save whose answer it waited for, and shares it again with the next one
        try:
            pays_here = shares_container(self._channel.peer_pid)
            memory = self._agent.tier.take(self._rank.hello, share, descriptor, pays_here=pays_here)
            self._rank.memories[share.memory] = memory
        except NoRoom as error:
            raise _Refusal(str(error)) from error
        except (UnusableMemory, OSError, ValueError) as error:
            raise _Refusal(f"the agent cannot map the staging memory: {error}") from error

    def _make_room(self, asked: say.MakeRoom) -> None:
        copies = shares_container(self._channel.peer_pid)
        if self.run is None or not self._agent.tier.make_room(self.run, states=not asked.spare, copies=copies):
            raise _Refusal("the agent keeps no state of an ended launch")

    def _forget(self, memory: int) -> None:
        with self._lock:
            if any(save.hand.memory == memory for save in self._saves.values()):
                return  # the job ends and has left it here: it is kept afterwards, and let go with the connection
        if self._rank is not None and (known := self._rank.memories.pop(memory, None)) is not None:
            self._agent.tier.let_go(known)
            self._work.put(_free_memory)  # behind the try that may still refer to it

    def _hold(self, hand: say.HandOver, body: bytes) -> None:
        memory = None if self._rank is None else self._rank.memories.get(hand.memory)
        if self._rank is None or memory is None:
            raise _Refusal("the agent does not have the memory of this save")
        if any(chunk.start + chunk.bytes > memory.bytes for chunk in hand.chunks) or sum(hand.documents) != len(body):
            raise _Refusal("the agent cannot find the bytes of this save")
        documents, start = [], 0
        for size in hand.documents:
            documents.append(body[start : start + size])
            start += size
        self._launch = self._agent.tier.launch_of(hand.launch_id)  # counted as it comes
        if self._job is None:
            self._job = self._agent.job_of(hand, self._rank.settings, self._rank.hello.host_ranks)
        save = HeldSave(
            hand,
            memory.view,
            documents,
            client=self._rank.client,
            workers=self._rank.workers,
            job=self._job,
            rank_lives=lambda: self.rank_lives,
            ledger=self._agent.ledger,
        )
        save.on_sealing = lambda: self._tell(say.Sealing(number=hand.number))
        with self._lock:
            self._saves[hand.number] = save
        self._agent.ledger.note(taken=1)
        if hand.is_proven:
            self._offer_handed(save)

    def _offer_handed(self, save: HeldSave) -> None:
        """Once it is proven: another host may have to seal it."""
        if self._met is not None and self._agent.copies is not None:
            self._agent.copies.offer_handed(save, self._held_part, self._met)

    def _release(self, asked: say.Release) -> None:
        with self._lock:
            save = self._saves.pop(asked.number, None)
            if save is None:
                return
            save.is_released = True
        if asked.digests:
            self._keep(save, asked.digests)
        elif self._met is not None and self._agent.copies is not None:
            self._agent.copies.withdraw(save.hand, self._met)
        if self._rank is not None and (memory := self._rank.memories.get(save.hand.memory)) is not None:
            self._agent.tier.release(memory)

    def _held_part(self, save: HeldSave, digests: Sequence[str]) -> Part | None:
        """A `HoldPart` of Copies."""
        with self._lock:
            is_held = self._saves.get(save.hand.number) is save
            part = self._part(save, digests) if is_held else None
            return part if part is not None and self._agent.tier.hold(part) else None

    def _lend(self) -> None:
        run = self.run
        if run is None:
            raise ChannelClosed("a rank borrows nothing before its hello")
        with self._agent.tier.lending(run, self._agent.sealed(run)) as lent:
            for part, descriptor in lent:
                self._channel.send(part.lent, tuple(part.documents), descriptor)
        self._channel.send(say.Taken())

    def _part(self, save: HeldSave, digests: Sequence[str]) -> Part | None:
        """None: its memory is gone, or these digests are another save's."""
        rank = self._rank
        if rank is None or (memory := rank.memories.get(save.hand.memory)) is None:
            return None
        if len(digests) != len(save.hand.chunks) + len(save.documents):
            return None
        launch = self._agent.tier.launch_of(save.hand.launch_id)
        return Part(save.hand, rank.hello.host_ranks, memory, digests, save.documents, launch)

    def _here(self) -> say.PeerHere:
        copies = self._agent.copies
        if self.run is None or copies is None:
            return say.PeerHere(address=None, ranks=[])
        return say.PeerHere(address=copies.address, ranks=self._agent.tier.ranks_of(self.run))

    def _keep(self, save: HeldSave, digests: Sequence[str]) -> None:
        if (part := self._part(save, digests)) is not None:
            self._agent.tier.keep(part)
            if self._met is not None and self._agent.copies is not None:
                self._agent.copies.offer(part, self._met)

    # The working thread.

    def _finish(self, save: HeldSave) -> None:
        save.finish()
        if save.is_committed:
            self._keep(save, save.digests)

    def _begin_for_lost_hosts(self) -> None:
        """In the name of this rank: it is of the same run."""
        rank, run, copies = self._rank, self.run, self._agent.copies
        if rank is not None and run is not None and copies is not None:
            copies.lost_hosts.begin(run, rank.settings, rank.hello.transfers, self._agent.ledger)

    def _do(self) -> None:
        while (work := self._work.get()) is not None:
            self._waits.set()
            try:
                work()
            except BaseException:
                log.exception("a save could not be carried out")
            if self._work.empty():
                self._waits.clear()
            del work
        self._over.set()
        with self._lock:
            self._saves.clear()
        if self._rank is not None:
            self._rank.workers.close()
            self._rank.client.close()
            while self._rank.memories:
                self._agent.tier.let_go(self._rank.memories.popitem()[1])
        if self._job is not None:
            self._agent.leave_job(self._job)
        if self.run is not None:
            self._agent.tier.leave(self.run)
        _free_memory()
        self._channel.close()
        self._agent.ended(self)

    def _run(self, asked: say.Run) -> None:
        with self._lock:
            save = self._saves.get(asked.number)
        if save is None:
            self._tell(say.Ended(number=asked.number, failure=say.Failure.of(KeyError(asked.number))))
            return
        writer = save.writer(asked.retry_seconds)
        writer.on_begun = lambda: self._tell(say.Begun(number=asked.number, view=writer.begun))
        writer.on_verified = lambda count: self._tell(say.Verified(number=asked.number, bytes=count))
        ended = say.Ended(number=asked.number)
        try:
            view = save.write(writer, asked.summary)
        except BaseException as error:  # the rank hears it, and decides
            if not isinstance(error, HoldfastError):
                log.exception("the agent's own trouble with %s", save)
            ended = ended.model_copy(update={"failure": say.Failure.of(error), "begin_failed": writer.begin_failed})
        else:
            ended = ended.model_copy(update={"view": view})
        self._tell(
            ended.model_copy(
                update={
                    "digests": writer.digests,
                    "sent_bytes": writer.sent_bytes,
                    "sent_chunk_bytes": writer.sent_chunk_bytes,
                }
            )
        )

    def _settle(self) -> None:
        """Waits until no dead rank's save of this run can be cut off any more by a new attempt."""
        run = self.run
        if run is None:
            return
        while not self._channel.is_hung_up() and (self._agent.has_unread_dead(run) or self._agent.left_by_dead(run)):
            time.sleep(_LOOK_SECONDS)
        if (copies := self._agent.copies) is not None:
            self._begin_for_lost_hosts()
            while not self._channel.is_hung_up() and copies.lost_hosts.is_sealing(run):
                time.sleep(_LOOK_SECONDS)
        self._tell(say.Settled())

    def _tell(self, told: BaseModel) -> None:
        with contextlib.suppress(ChannelClosed):  # the reading thread knows, or will
            self._channel.send(told)

    def _say_alive(self) -> None:
        """Only while the rank waits, so that a training job is not woken for nothing."""
        while not self._over.wait(ALIVE_SECONDS):
            if self._waits.is_set():
                self._tell(say.Alive())


def _of_other_versions(jobs: str) -> str:
    return (
        f"the agent of this node is holdfast {version('holdfast')}, and does not speak with this job's {jobs}. "
        "Start the agent with the job's version"
    )


def _free_memory() -> None:
    """Unmaps what only tries that are over still refer to. They and their errors refer to themselves, and the collector
    comes by allocations: an agent without work makes none, and would hold the memory of a job that has ended."""
    gc.collect()
