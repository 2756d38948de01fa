"""Frames on a Unix socket, with descriptors beside them; and whose process is at the other end. Linux only.

[bytes of the JSON: 4][bytes of the body: 8][JSON][body]
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from holdfast_client.errors import ConfigurationError

_HEAD = struct.Struct("!IQ")
_MOST_JSON_BYTES = 256 * 1024**2
_MOST_BODY_BYTES = 4 * 1024**3
_MOST_DESCRIPTORS = 1
_BLOCK_BYTES = 1024**2
_LONGEST_PATH_BYTES = 107
SEND_SECONDS = 10
"""A peer that takes nothing for so long, or no whole frame, is stopped or hangs."""


class ChannelClosed(OSError):  # noqa: N818  (said aloud, it is what happened)
    """The other side is gone, silent, or not ours."""


class Channel:
    """One connection. Any thread may send; one thread receives. `close` from the receiving thread, `shut` from any."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._sending = threading.Lock()
        self._peer = _pid_descriptor(self.peer_pid)
        """Readable once that process is dead: its children may hold the socket open for long."""

    @property
    def peer_pid(self) -> int:
        """0: in another namespace."""
        return self._credentials()[0]

    def refuse_strangers(self) -> None:
        """Raises ChannelClosed for another user's process."""
        if self._credentials()[1] != os.geteuid():
            raise ChannelClosed("this is another user's process")

    def _credentials(self) -> tuple[int, int, int]:
        told = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, user, group = struct.unpack("3i", told)
        return pid, user, group

    def send(
        self,
        frame: BaseModel,
        body: Sequence[bytes] = (),
        descriptor: int | None = None,
        *,
        seconds: float = SEND_SECONDS,
    ) -> None:
        """Raises ChannelClosed, and afterwards nothing can be sent any more: half a frame may be under way."""
        until = time.monotonic() + seconds
        text = frame.model_dump_json().encode()
        head = _HEAD.pack(len(text), sum(map(len, body)))
        beside = [] if descriptor is None else [_rights(descriptor)]
        is_ours = False
        try:
            if not (is_ours := self._sending.acquire(timeout=seconds)):
                raise OSError("the peer takes too little")
            self._wait_for_room(until)
            if self.socket.sendmsg([head], beside, socket.MSG_DONTWAIT) != len(head):
                raise OSError("the peer takes nothing")
            for part in (text, *body):
                self._send_all(memoryview(part), until)
        except (OSError, ValueError) as error:  # ValueError: closed by its own thread meanwhile
            self.shut()
            raise ChannelClosed(f"the other side is gone ({error})") from error
        finally:
            if is_ours:
                self._sending.release()

    def _send_all(self, left: memoryview, until: float) -> None:
        """Not `sendall`, whose time counts anew with each piece that the peer takes: training may wait for this."""
        while left:
            with contextlib.suppress(BlockingIOError):
                left = left[self.socket.send(left, socket.MSG_DONTWAIT) :]
            if left:
                self._wait_for_room(until, is_strict=True)

    def _wait_for_room(self, until: float, *, is_strict: bool = False) -> None:
        """`is_strict`: there must be room before `until`. Else this process may have been stopped until then, and the
        peer is not to blame."""
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        left = until - time.monotonic()
        if (is_strict and left < 0) or not poll.poll(max(0.0, left) * 1000):
            raise OSError("the peer takes too little")

    def receive(self) -> tuple[bytes, bytes, int | None]:
        """JSON, body, and the descriptor that came with them, which the caller closes. Raises ChannelClosed once the
        other side is gone and all that it had said is read."""
        head, descriptor = self._receive_head()
        try:
            text_bytes, body_bytes = _HEAD.unpack(head)
            if text_bytes > _MOST_JSON_BYTES or body_bytes > _MOST_BODY_BYTES:
                raise ChannelClosed("this is no frame of ours")
            return self._exactly(text_bytes), self._exactly(body_bytes), descriptor
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise

    def is_hung_up(self) -> bool:
        """Whether the other side is gone, though some of what it had said may not be read yet."""
        peer = self._peer
        if peer is not None and _is_readable(peer):
            return True
        poll = select.poll()
        try:
            poll.register(self.socket, 0)
        except ValueError:  # closed by its own thread meanwhile
            return True
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))

    @property
    def peer_lives(self) -> bool:
        """Whether the other side's process is known to live, even if the connection is over. Until `close`."""
        peer = self._peer
        return peer is not None and not _is_readable(peer)

    def shut(self) -> None:
        """From any thread; the receiving one then ends with ChannelClosed."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """In a forked child: closes its descriptors alone."""
        self.socket.close()
        peer, self._peer = self._peer, None
        if peer is not None:
            os.close(peer)

    def _receive_head(self) -> tuple[bytes, int | None]:
        self._wait()
        try:
            head, beside, _, _ = self.socket.recvmsg(
                _HEAD.size, socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise ChannelClosed(f"the other side is gone ({error})") from error
        descriptors = array.array("i")
        for level, kind, data in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        descriptor = descriptors[0] if descriptors else None
        for each in descriptors[1:]:
            os.close(each)
        if not head:
            raise ChannelClosed("the other side is gone")
        try:
            return head + self._exactly(_HEAD.size - len(head)), descriptor
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise

    def _exactly(self, count: int) -> bytes:
        """No memory is taken for bytes that have not come."""
        come = bytearray()
        while len(come) < count:
            self._wait()
            try:
                got = self.socket.recv(min(count - len(come), _BLOCK_BYTES))
            except OSError as error:
                raise ChannelClosed(f"the other side is gone ({error})") from error
            if not got:
                raise ChannelClosed("the other side has ended within a frame")
            come += got
        return bytes(come)

    def _wait(self) -> None:
        """Returns when there is something to read, or the end. A dead peer's last words are read first."""
        if self._peer is None:
            return
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        poll.register(self._peer, select.POLLIN)
        heard = {descriptor for descriptor, _ in poll.poll()}
        # Asked once more: it may have spoken and died between two looks of the kernel.
        if self.socket.fileno() not in heard and not _is_readable(self.socket.fileno()):
            raise ChannelClosed("the other side's process is dead")


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()  # select() takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _rights(descriptor: int) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]).tobytes()


def _pid_descriptor(pid: int) -> int | None:
    """None where the process cannot be seen: the socket's end then says that it is gone."""
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def connect(path: Path, seconds: float) -> Channel:
    """A connection to the agent of this user at `path`. Raises ConfigurationError if other users could put a socket of
    theirs there, and OSError if no agent listens there."""
    refuse_long(path)
    found = os.stat(path.parent)
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigurationError(
            f"{path.parent} is not this user's alone, so the socket in it may be anybody's. Name one in a folder of "
            "your own, with mode 0700 (HOLDFAST_AGENT)."
        )
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(seconds)
        connected.connect(str(path))
        connected.settimeout(None)
        channel = Channel(connected)
    except BaseException:
        connected.close()
        raise
    try:
        channel.refuse_strangers()
    except BaseException:
        channel.close()
        raise
    return channel


def refuse_long(path: Path) -> None:
    """Raises ConfigurationError for a path that a socket cannot have."""
    if len(os.fsencode(path)) > _LONGEST_PATH_BYTES:
        raise ConfigurationError(
            f"The socket's path {path} has {len(os.fsencode(path))} bytes, and {_LONGEST_PATH_BYTES} are the most that "
            "the system takes. Name a shorter one."
        )
