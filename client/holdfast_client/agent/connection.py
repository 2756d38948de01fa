"""A rank's connection to the agent of its node, while it lasts: questions, answered in their order, and what the agent
says of its tries. A thread reads it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from holdfast_client.agent import messages as say
from holdfast_client.agent.channel import SEND_SECONDS, Channel, ChannelClosed
from holdfast_client.agent.shared_memory import SharedMemory

log = logging.getLogger("holdfast")

ANSWER_SECONDS = 10.0
"""An agent answers at once. On a crowded machine it may take a moment."""
TRAINING_SECONDS = 1.0
"""So long training waits for the answer; afterwards the upload thread does."""
SILENCE_SECONDS = 15.0
"""While a rank waits, the agent says every 2 s that it is alive."""
_LOOK_SECONDS = 0.1

Events = queue.SimpleQueue[say.Begun | say.Verified | say.Sealing | say.Ended | None]
LentPart = tuple[say.Lent, bytes, int]
"""With the bytes of its documents, and the descriptor of its memory."""


class AgentRefused(Exception):  # noqa: N818
    """It says why."""


class _Question(NamedTuple):
    asked_at: float
    answer: Future[say.Told]


def _taken(answers: Sequence[Future[say.Told]], seconds: float) -> None:
    """Returns when the agent has taken it. Raises AgentRefused, ChannelClosed, and TimeoutError."""
    until = time.monotonic() + seconds
    for answer in answers:
        told = answer.result(max(0.0, until - time.monotonic()))
        if isinstance(told, say.Refused):
            raise AgentRefused(told.reason)


class Connection:
    """Thread-safe."""

    def __init__(self, channel: Channel, on_lost: Callable[[], None] = lambda: None) -> None:
        self.channel = channel
        self.is_lost = False
        self.keeps = 0
        """How many states of the run the agent keeps while the next one is staged."""
        self.leaves = False
        """Without a word of its end, the agent finishes what it holds."""
        self._on_lost = on_lost
        self._heard_at = time.monotonic()
        self._asking = threading.Lock()
        self._asked: deque[_Question] = deque()
        """Those whose answers are still to come, in their order."""
        self._events: dict[int, Events] = {}
        self._lent: list[LentPart] = []
        self._shared: set[int] = set()
        self._thread = threading.Thread(target=self._read, name="holdfast-agent", daemon=True)
        self._thread.start()

    def greet(self, hello: say.Hello) -> None:
        """Raises AgentRefused, and ChannelClosed."""
        answer = self.ask(hello)
        self._wait_for(answer)
        if isinstance(welcome := answer.result(), say.Welcome):
            self.keeps = welcome.keeps

    def borrow(self) -> list[LentPart]:
        """The kept parts of the run. Raises AgentRefused, and ChannelClosed."""
        self._wait_for(self.ask(say.Borrow()))
        return self._take_lent()

    def here(self) -> say.PeerHere | None:
        """Where agents of other hosts reach it, and what it has. Raises ChannelClosed."""
        self._wait_for(answer := self.ask(say.Here()))
        told = answer.result()
        return told if isinstance(told, say.PeerHere) else None

    def share_spare(self, memory: SharedMemory) -> None:
        """Memory beside that of the other states. Training waits for the answer. Raises AgentRefused, ChannelClosed,
        and TimeoutError."""
        answer = self._share(memory, is_spare=True)
        self.wait_a_moment(memory, [answer])

    def keep_less(self, why: str) -> None:
        """No more spare memory."""
        self.keeps = 0
        log.warning(
            "the agent of this node keeps a state only until the next one is staged, because there is no memory for "
            "both: %s",
            why,
        )

    def make_room(self, *, spare: bool) -> None:
        """A copy goes, or a state that an ended launch has left, but that not for `spare` memory. Training waits for
        the answer. Raises AgentRefused if there is none, ChannelClosed, and TimeoutError."""
        _taken([self.ask(say.MakeRoom(spare=spare), seconds=TRAINING_SECONDS)], TRAINING_SECONDS)

    def reclaim(self, memory: SharedMemory) -> None:
        """Raises ChannelClosed if the agent does not hear of it."""
        if not self.has(memory):
            raise ChannelClosed("another connection has this memory")
        self.channel.send(say.Reclaim(memory=memory.id), seconds=TRAINING_SECONDS)

    def has(self, memory: SharedMemory) -> bool:
        """Whether the agent has it, as far as it has said."""
        return memory.id in self._shared

    def hand_over(self, memory: SharedMemory, hand: say.HandOver, documents: Sequence[bytes]) -> list[Future[say.Told]]:
        """The answers to expect. Raises as `ask`."""
        answers = [] if self.has(memory) else [self._share(memory)]
        return [*answers, self.ask(hand, documents, seconds=TRAINING_SECONDS)]

    @property
    def owes(self) -> bool:
        """An answer is still to come."""
        return bool(self._asked)

    def wait_a_moment(self, memory: SharedMemory, answers: Sequence[Future[say.Told]]) -> None:
        """As `wait_until_taken`, for the training thread: TRAINING_SECONDS at most since the first question whose
        answer is still to come. So it waits once for an agent that hangs."""
        asked_at = time.monotonic()
        with contextlib.suppress(IndexError):
            asked_at = self._asked[0].asked_at
        self.wait_until_taken(memory, answers, max(0.0, asked_at + TRAINING_SECONDS - time.monotonic()))

    def wait_until_taken(self, memory: SharedMemory, answers: Sequence[Future[say.Told]], seconds: float) -> None:
        """`answers`: of `hand_over`. Raises AgentRefused, ChannelClosed, and TimeoutError."""
        _taken(answers, seconds)
        self._shared.add(memory.id)

    def _share(self, memory: SharedMemory, *, is_spare: bool = False) -> Future[say.Told]:
        share = say.Share(memory=memory.id, bytes=memory.bytes, spare=is_spare)
        answer = self.ask(share, descriptor=memory.descriptor, seconds=TRAINING_SECONDS)
        memory.on_close = functools.partial(self._forget, memory.id)
        return answer

    def _forget(self, memory: int) -> None:
        """At once: the host may not have room for this memory and the next one."""
        self._shared.discard(memory)
        with contextlib.suppress(ChannelClosed):
            self.channel.send(say.Forget(memory=memory), seconds=TRAINING_SECONDS)

    def ask(
        self,
        frame: BaseModel,
        body: Sequence[bytes] = (),
        descriptor: int | None = None,
        *,
        seconds: float = SEND_SECONDS,
    ) -> Future[say.Told]:
        """What the agent will answer; ChannelClosed once it is gone. Raises ChannelClosed if it takes nothing for so
        many seconds."""
        answer: Future[say.Told] = Future()
        with self._asking:
            self._asked.append(_Question(time.monotonic(), answer))
            try:
                self.channel.send(frame, body, descriptor, seconds=seconds)
            except BaseException:  # half a frame may be under way
                self.lose()
                raise
        return answer

    def _wait_for(self, answer: Future[say.Told]) -> None:
        """At most ANSWER_SECONDS: then it counts as gone. Raises AgentRefused, and ChannelClosed."""
        try:
            _taken([answer], ANSWER_SECONDS)
        except TimeoutError:
            self.lose()
            raise ChannelClosed(f"it has not answered for {ANSWER_SECONDS:.0f} s") from None

    def settle(self, seconds: float) -> None:
        """Raises TimeoutError, and ChannelClosed."""
        until = time.monotonic() + seconds
        self._heard_at = time.monotonic()
        answer = self.ask(say.Settle())
        while True:
            with contextlib.suppress(TimeoutError):
                answer.result(_LOOK_SECONDS)
                return
            self.lose_if_silent()
            if time.monotonic() >= until:
                self.lose()  # it would keep its working thread until then
                raise TimeoutError

    def follow(self, number: int) -> Events:
        events: Events = queue.SimpleQueue()
        self._heard_at = time.monotonic()
        self._events[number] = events
        if self.is_lost:
            events.put(None)
        return events

    def unfollow(self, number: int) -> None:
        self._events.pop(number, None)

    def lose_if_silent(self) -> None:
        if time.monotonic() - self._heard_at > SILENCE_SECONDS:
            self.lose()

    def lose(self) -> None:
        """Whatever waits for the agent ends with ChannelClosed or AgentGone."""
        self.is_lost = True
        self.channel.shut()

    def close(self, *, is_finished: bool = False) -> None:
        """`is_finished`: as Bye's."""
        if not self.leaves:
            with contextlib.suppress(ChannelClosed):
                self.channel.send(say.Bye(is_finished=is_finished))
        self.lose()
        self._thread.join(ANSWER_SECONDS)

    def _read(self) -> None:
        try:
            while True:
                text, body, descriptor = self.channel.receive()
                self._heard_at = time.monotonic()
                match told := self._told(text, body, descriptor):
                    case say.Begun() | say.Verified() | say.Sealing() | say.Ended():
                        if (events := self._events.get(told.number)) is not None:
                            events.put(told)
                    case say.Alive() | say.Lent():
                        pass
                    case _:
                        self._asked.popleft().answer.set_result(told)
        except (ChannelClosed, ValidationError, IndexError) as error:
            log.debug("the agent's connection ends: %s", error)
        finally:
            self.is_lost = True
            with self._asking:  # what is asked later cannot be sent
                self.channel.close()
                for question in self._asked:
                    question.answer.set_exception(ChannelClosed("it has ended"))
            for _, _, descriptor in self._take_lent():
                os.close(descriptor)
            for waiting in [*self._events.values()]:
                waiting.put(None)
            self._on_lost()

    def _told(self, text: bytes, body: bytes, descriptor: int | None) -> say.Told:
        """The frame. A descriptor stays with what is lent."""
        try:
            told = say.TOLD.validate_json(text)
            if isinstance(told, say.Lent) and descriptor is not None:
                self._lent.append((told, body, descriptor))
                descriptor = None
            return told
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _take_lent(self) -> list[LentPart]:
        """Each once, whichever thread asks."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._lent.pop(0))
        return taken
