"""The socket between a rank and its node's agent: frames, descriptors, and the death of the other side."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast_client.agent import channel as channels
from holdfast_client.agent import messages as say
from holdfast_client.agent.channel import Channel, ChannelClosed, connect
from holdfast_client.errors import ChunkCorrupt, ConfigurationError, ServiceUnavailable, StaleAttempt
from holdfast_client.settings import ClientSettings

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="agents need Linux")


@pytest.fixture
def pair():
    ours, theirs = (Channel(each) for each in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_frame_arrives_whole_with_its_bytes_and_its_descriptor(pair):
    ours, theirs = pair
    body = [os.urandom(3_000_000), b"", b"last"]
    with open(os.devnull, "rb") as file:
        sending = threading.Thread(target=ours.send, args=(say.Share(memory=3, bytes=9), body, file.fileno()))
        sending.start()
        text, got, descriptor = theirs.receive()
        sending.join()
        assert say.ASKED.validate_json(text) == say.Share(memory=3, bytes=9)
        assert got == b"".join(body)
        assert os.fstat(descriptor).st_rdev == os.fstat(file.fileno()).st_rdev
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)


def test_what_a_peer_said_last_is_read_before_its_end(pair):
    ours, theirs = pair
    ours.send(say.Bye())
    ours.close()
    assert say.ASKED.validate_json(theirs.receive()[0]) == say.Bye()
    with pytest.raises(ChannelClosed):
        theirs.receive()


def test_half_a_frame_is_no_frame(pair):
    ours, theirs = pair
    ours.socket.sendall(b"\0\0\0\x09\0\0\0\0\0\0\0\0{")
    ours.close()
    with pytest.raises(ChannelClosed, match="within a frame"):
        theirs.receive()


def test_a_frame_without_end_is_refused_before_it_takes_memory(pair):
    ours, theirs = pair
    ours.socket.sendall(b"\xff" * 12)
    with pytest.raises(ChannelClosed, match="no frame of ours"):
        theirs.receive()


def test_a_peer_that_takes_a_frame_piece_by_piece_is_given_up(pair, monkeypatch):
    ours, theirs = pair
    clock = itertools.count(0, channels.SEND_SECONDS / 2 + 1)

    def later():
        with contextlib.suppress(BlockingIOError):
            theirs.socket.recv(4 * 1024**2, socket.MSG_DONTWAIT)
        return next(clock)

    monkeypatch.setattr(channels, "time", SimpleNamespace(monotonic=later))
    with pytest.raises(ChannelClosed, match="takes too little"):
        ours.send(say.Bye(), [bytes(64 * 1024**2)])
    monkeypatch.undo()
    with pytest.raises(ChannelClosed):
        ours.send(say.Bye())


def test_a_process_that_was_stopped_before_it_could_send_does_not_give_up_its_peer(pair):
    ours, theirs = pair
    ours.send(say.Bye(), [b"x"], seconds=0)
    assert theirs.receive()[1] == b"x"


def listening(folder):
    path = folder / "agent.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return path, listener


@pytest.fixture
def folder(tmp_path_factory):
    made = Path(tmp_path_factory.mktemp("a"))
    made.chmod(0o700)
    return made


def test_a_killed_process_is_gone_though_its_child_holds_the_socket_open(folder):
    path, listener = listening(folder)
    read, write = os.pipe()
    rank = os.fork()
    if rank == 0:  # the rank: says a word, forks a child that lives on, and is killed
        try:
            own = connect(path, 60)
            own.send(say.Bye())
            child = os.fork()
            if child == 0:
                os.close(write)
                os.read(read, 1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.close(read)
    try:
        theirs = Channel(listener.accept()[0])
        assert theirs.peer_pid == rank
        os.waitpid(rank, 0)
        assert say.ASKED.validate_json(theirs.receive()[0]) == say.Bye()
        assert theirs.is_hung_up()
        with pytest.raises(ChannelClosed, match="is dead"):
            theirs.receive()
        theirs.close()
    finally:
        os.close(write)
        listener.close()


def test_another_users_process_is_refused(folder, monkeypatch):
    path, listener = listening(folder)
    monkeypatch.setattr(channels.os, "geteuid", lambda: os.getuid())
    ours = connect(path, 60)
    monkeypatch.setattr(channels.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ChannelClosed, match="another user"):
        ours.refuse_strangers()
    with pytest.raises(ConfigurationError, match="not this user's alone"):
        connect(path, 60)
    ours.close()
    listener.close()


def test_a_folder_that_others_can_change_and_a_path_that_is_too_long_are_refused(folder):
    path, listener = listening(folder)
    folder.chmod(0o770)
    with pytest.raises(ConfigurationError, match="0700"):
        connect(path, 60)
    with pytest.raises(ConfigurationError, match="107"):
        connect(folder / ("x" * 120), 60)
    listener.close()


@pytest.mark.parametrize(
    "error",
    [
        StaleAttempt("fenced", context={"latest_attempt": 3}, request_id="r1"),
        ServiceUnavailable("away", earlier_try_ambiguous=True),
        ChunkCorrupt("0" * 64, "missing", "is not here"),
    ],
)
def test_an_error_of_the_agent_is_the_same_one_in_the_rank(error):
    sent = say.Ended(number=1, failure=say.Failure.of(error))
    read = say.TOLD.validate_json(sent.model_dump_json()).failure.error()
    assert type(read) is type(error)
    assert str(read) == str(error)
    assert read.context == error.context
    assert read.request_id == error.request_id
    assert read.earlier_try_ambiguous == error.earlier_try_ambiguous


def test_trouble_that_is_the_agents_own_is_no_error_of_the_rank():
    assert say.Failure.of(MemoryError("none left")).error() is None


def test_the_agent_calls_as_the_rank_does_whatever_its_own_environment_says(monkeypatch, tmp_path):
    rank = ClientSettings(url="https://h.example", token="hold_abc", data_dir=tmp_path, compress="zstd")
    told = say.Caller.of(rank).model_dump_json()
    monkeypatch.setenv("HOLDFAST_URL", "http://other.example")
    monkeypatch.setenv("HOLDFAST_TOKEN", "hold_other")
    read = say.Caller.model_validate_json(told).client_settings()
    assert read == rank
