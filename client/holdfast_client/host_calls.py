"""The ranks of one host begin and seal a checkpoint in one call together.

    rank 1 ─┐ frames on a local socket
    rank 2 ─┼─> leader: a group per checkpoint ─> one call of the service ─> each rank's part of the reply
    leader ─┘

Nobody depends on it: these calls can be repeated, so a rank whose leader is gone, silent or refused calls alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter

from holdfast_client.client import Client
from holdfast_protocol import checkpoints as protocol
from holdfast_protocol.checkpoints import BeginCheckpoint, CheckpointBegun, CheckpointView, SealShard

log = logging.getLogger("holdfast.client")

BEGIN_WINDOW_SECONDS = 0.5
"""The call is made when no further rank of the host has come for so long: on a busy host they come slowly. They leave
the vote on a save together; a rank that waits sends nothing meanwhile."""
SEAL_WINDOW_SECONDS = 2.0
"""They hash and send for unequal times. The commit needs the last of them, and that one finds that all others have
called, and waits for nobody."""
_KEYS_KEPT = 16
KEEP_ALIVE_SECONDS = 2.0
SILENCE_SECONDS = 5.0
"""A rank whose leader says nothing for so long calls alone. A leader that waits for the service is not silent."""
MOST_REQUEST_BYTES = 64 * 1024
MOST_GROUP_BYTES = 512 * 1024
"""Half of what the service takes."""

_ALONE = b"null"
_BROKEN = (
    OSError,
    EOFError,
    ValueError,  # a frame that is not ours
    AuthenticationError,
    AssertionError,  # in Python 3.11 of a peer that does not know the handshake
    RuntimeError,  # no thread can be started
)


class _Call(BaseModel):
    """A frame that a rank sends. Calls with the same `key` can be made as one."""

    key: str
    rank: int
    chunks: int


class _Begin(_Call):
    project: str
    run: str
    begin: BeginCheckpoint
    """Without offers: the same for all ranks."""
    offer: protocol.FirstOffer

    @property
    def window_seconds(self) -> float:
        return BEGIN_WINDOW_SECONDS

    @staticmethod
    def together(client: Client, calls: Sequence[_Begin]) -> dict[int, CheckpointView]:
        request = calls[0].begin.model_copy(update={"offers": [call.offer for call in calls]})
        begun = client.checkpoints.begin(calls[0].project, calls[0].run, request)
        parts = {call.rank: [part for part in begun.negotiated if part.rank == call.rank] for call in calls}
        return {rank: begun.model_copy(update={"negotiated": part}) for rank, part in parts.items()}


class _Seal(_Call):
    checkpoint_id: str
    seal: protocol.RankSeal

    @property
    def window_seconds(self) -> float:
        return SEAL_WINDOW_SECONDS

    @staticmethod
    def together(client: Client, calls: Sequence[_Seal]) -> dict[int, CheckpointView]:
        seals = protocol.SealShards(seals=[call.seal for call in calls])
        return dict.fromkeys(
            (call.rank for call in calls), client.checkpoints.seal_together(calls[0].checkpoint_id, seals)
        )


_FRAME: TypeAdapter[_Begin | _Seal] = TypeAdapter(_Begin | _Seal)
ReplyT = TypeVar("ReplyT", bound=CheckpointView)


class HostCalls:
    """For one process. Thread-safe."""

    def __init__(self, client: Client, *, secret: str, count: int, leads: bool) -> None:
        """`secret`: a text that the `count` ranks of this host know, and nobody else. `leads`: on exactly one of them.
        `client` makes the leader's joint calls."""
        self._secret = secret.encode()
        # An abstract name leaves no file behind: the system forgets it with the process.
        self._address = f"\0holdfast-{hashlib.sha256(self._secret).hexdigest()[:32]}"
        self._count = count
        self._ending = False
        self._closed = threading.Event()
        # A busy service may tell a joint call to retry, and all ranks at once would make it busier. Once this
        # deadline is over, each rank retries within its own.
        self._client = client.with_retry_deadline(client.settings.retry_seconds, self._closed)
        self._lock = threading.Lock()
        self._open: dict[str, _Group] = {}
        self._called: OrderedDict[str, set[int]] = OrderedDict()
        """The ranks that have handed in a call, by key, until all have."""
        self._links: set[_Link] = set()
        self._asking = threading.Lock()
        self._leader: _Link | None = None
        self._listener: socket.socket | None = None
        self._leads = leads
        self._is_joined = True
        if leads:
            self._listen()

    @classmethod
    def of(cls, client: Client, *, secret: str, count: int, leads: bool) -> HostCalls | None:
        """None off Linux, and for a rank alone on its host: it makes each call directly."""
        return cls(client, secret=secret, count=count, leads=leads) if count > 1 and sys.platform == "linux" else None

    def begin(self, client: Client, project: str, run: str, request: BeginCheckpoint) -> CheckpointBegun:
        """As `client.checkpoints.begin`, together with the host's other ranks if it has exactly one offer. `client` is
        the rank's own, for a call alone. Raises what that call raises."""
        if self._is_joined and len(request.offers) == 1:
            [offer], begin = request.offers, request.model_copy(update={"offers": []})
            call = _Begin(
                key=f"{project}/{run} {begin.model_dump_json()}",
                rank=offer.rank,
                chunks=len(offer.chunks),
                project=project,
                run=run,
                begin=begin,
                offer=offer,
            )
            if (begun := self._together(call, CheckpointBegun)) is not None:
                return begun
        return client.checkpoints.begin(project, run, request)

    def seal(self, client: Client, checkpoint_id: str, rank: int, seal: SealShard) -> CheckpointView:
        """As `client.checkpoints.seal`, together with the host's other ranks."""
        if self._is_joined and len(seal.chunks) <= protocol.MAX_BATCH:
            call = _Seal(
                key=f"{checkpoint_id} {seal.epoch} {seal.attempt} {seal.launch_id}",
                rank=rank,
                chunks=len(seal.chunks),
                checkpoint_id=checkpoint_id,
                seal=protocol.RankSeal(**dict(seal), rank=rank),
            )
            if (view := self._together(call, CheckpointView)) is not None:
                return view
        return client.checkpoints.seal(checkpoint_id, rank, seal)

    def flush(self, *, last: bool = False) -> None:
        """Makes the calls that wait for other ranks now. `last`: afterwards each rank calls alone."""
        with self._lock:
            self._ending = self._ending or last
            for group in self._open.values():
                group.complete.set()

    def close(self) -> None:
        """At the end of the job. Calls that are under way are cut off. A second call does nothing."""
        self.flush(last=True)
        with self._lock:
            self._closed.set()
            links = [*self._links]
        for link in links:
            _shut(link.socket)
        if self._listener is not None:
            _shut(self._listener)
        if self._asking.acquire(blocking=False):  # else the thread that asks reads the end
            self._hang_up()
            self._asking.release()

    def _together(self, call: _Begin | _Seal, kind: type[ReplyT]) -> ReplyT | None:
        """None: this rank must call alone."""
        frame = call.model_dump_json().encode()
        if len(frame) > MOST_REQUEST_BYTES or self._ending:
            return None
        try:
            if self._leads:
                reply = self._reply(call, len(frame), meanwhile=lambda: None)
                return reply if isinstance(reply, kind) else None
            said = self._ask_leader(frame)
            return None if said == _ALONE else kind.model_validate_json(said)
        except _BROKEN as error:
            log.debug("rank %d calls the service alone: %s", call.rank, error)
            return None

    def _ask_leader(self, frame: bytes) -> bytes:
        """The leader's reply. Raises what breaks the connection; a later call makes a new one."""
        if not self._asking.acquire(blocking=False):
            return _ALONE  # another thread's call has the connection
        try:
            if self._leader is None:
                self._leader = self._add(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                self._leader.socket.connect(self._address)
                if self._closed.is_set():
                    raise OSError("the job has ended")  # close() could not cut what was not connected
                self._leader.refuse_strangers()
                answer_challenge(self._leader, self._secret)
                deliver_challenge(self._leader, self._secret)
            self._leader.send_bytes(frame)
            while not (said := self._leader.receive()):
                pass
            return said
        except BaseException:
            self._hang_up()
            raise
        finally:
            self._asking.release()

    def _hang_up(self) -> None:
        if self._leader is not None:
            self._drop(self._leader)
            self._leader = None

    def _listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(self._address)
            self._listener.listen(self._count)
            self._start(self._accept, self._listener)
        except (OSError, RuntimeError) as error:
            self._listener.close()
            self._is_joined = False
            log.info("the ranks of this host call the service one by one: %s", error)

    def _accept(self, listener: socket.socket) -> None:
        # Each connection's own thread makes the handshake: a process that says nothing must not keep others out.
        try:
            while True:
                self._start(self._serve, self._add(listener.accept()[0]))
        except (OSError, RuntimeError) as error:
            log.debug("the leader of this host takes no more ranks: %s", error)
        finally:
            _shut(listener)
            listener.close()

    def _serve(self, link: _Link) -> None:
        """One rank's calls, until it is gone. A rank that dies or hangs ends this thread and harms no group."""
        try:
            link.refuse_strangers()
            deliver_challenge(link, self._secret)
            answer_challenge(link, self._secret)
            while link.poll(None):
                frame = link.recv_bytes(MOST_REQUEST_BYTES)
                reply = self._reply(_FRAME.validate_json(frame), len(frame), lambda: link.send_bytes(b""))
                link.send_bytes(_ALONE if reply is None else reply.model_dump_json().encode())
        except _BROKEN as error:
            log.debug("a rank of this host has left: %s", error)
        finally:
            self._drop(link)

    def _reply(self, call: _Begin | _Seal, size: int, meanwhile: Callable[[], None]) -> CheckpointView | None:
        """In the leader: the call's part of its group's reply; None if it must be made alone."""
        with self._lock:
            group = self._open.get(call.key)
            if group is None or not group.takes(call, size):
                full, group = group, _Group()
                if self._ending:
                    return None
                # First: without a thread nobody may wait for the group.
                self._start(self._make, call.key, group, call.window_seconds)
                self._open[call.key] = group
                if full is not None:
                    full.complete.set()
            group.add(call, size)
            if self._have_all_called(call):
                group.complete.set()
        while not group.done.wait(KEEP_ALIVE_SECONDS):
            if self._closed.is_set():
                return None
            meanwhile()
        return group.replies.get(call.rank)

    def _have_all_called(self, call: _Begin | _Seal) -> bool:
        called = self._called.setdefault(call.key, set())
        called.add(call.rank)
        if len(called) == self._count:
            del self._called[call.key]
            return True
        self._called.move_to_end(call.key)
        if len(self._called) > _KEYS_KEPT:
            self._called.popitem(last=False)
        return False

    def _make(self, key: str, group: _Group, window_seconds: float) -> None:
        """On a thread of its own, so that the ranks that wait hear that the leader is alive."""
        try:
            seen = 0
            while (come := self._come(group)) > seen and not group.complete.wait(window_seconds):
                seen = come
            with self._lock:
                if self._open.get(key) is group:
                    del self._open[key]
            calls: list[Any] = [*group.calls.values()]
            # A rank alone makes its own call; but at the end of the job its own client makes no more.
            if len(calls) > 1 or self._ending:
                group.replies = calls[0].together(self._client, calls)
        except Exception as error:  # each rank calls alone, and hears its own error
            log.info("%d ranks of this host call the service one by one: %s", len(group.calls), error)
        finally:
            group.done.set()

    def _come(self, group: _Group) -> int:
        """How many ranks are in it; at least the one that has opened it."""
        with self._lock:
            return len(group.calls)

    def _start(self, work: Callable[..., None], *of: object) -> None:
        threading.Thread(target=work, args=of, name="holdfast-host", daemon=True).start()

    def _add(self, connected: socket.socket) -> _Link:
        with self._lock:
            if self._closed.is_set():
                connected.close()
                raise OSError("the job has ended")
            link = _Link(connected)
            self._links.add(link)
            return link

    def _drop(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)
        link.close()


class _Group:
    """The calls that are made as one, by rank."""

    def __init__(self) -> None:
        self.calls: dict[int, _Begin | _Seal] = {}
        self.replies: Mapping[int, CheckpointView] = {}
        self.complete, self.done = threading.Event(), threading.Event()
        self._bytes = self._chunks = 0

    def takes(self, call: _Begin | _Seal, size: int) -> bool:
        fits = self._bytes + size <= MOST_GROUP_BYTES and self._chunks + call.chunks <= protocol.MAX_BATCH
        has_room = len(self.calls) < protocol.MAX_RANKS and call.rank not in self.calls
        return fits and has_room and not self.complete.is_set()

    def add(self, call: _Begin | _Seal, size: int) -> None:
        self.calls[call.rank] = call
        self._bytes += size
        self._chunks += call.chunks


class _Link(Connection):
    """A connection between a rank and its leader. Only its own thread closes it; any thread may shut the socket."""

    def __init__(self, connected: socket.socket) -> None:
        # A peer that is stopped within a frame, or before it accepts, must not hold this thread. Not settimeout: it
        # would make the descriptor non-blocking, and Connection reads and writes the descriptor.
        limit = struct.pack("@ll", int(SILENCE_SECONDS), int(SILENCE_SECONDS % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, limit)
        self.socket = connected
        super().__init__(os.dup(connected.fileno()))

    def refuse_strangers(self) -> None:
        """Raises OSError for another user's process: the socket's name is no secret, and the handshake does not say
        which of two ranks has made it."""
        peer = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", peer)[1] != os.geteuid():
            raise OSError("this is another user's process")

    def receive(self) -> bytes:
        """The next frame; an empty one says that the leader is alive. Raises OSError after a silence."""
        if not self.poll(SILENCE_SECONDS):
            raise TimeoutError("the leader of this host is silent")
        return self.recv_bytes()

    def close(self) -> None:
        _shut(self.socket)  # a forked child may hold the descriptors too
        self.socket.close()
        super().close()


def _shut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
