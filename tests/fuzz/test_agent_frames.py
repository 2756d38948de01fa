"""What a rank and the agent of its node say to each other: whatever comes over the socket is a frame, or ends the
connection by the error that says so, and takes no memory for bytes that have not come."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from holdfast_client.agent import messages as say
from holdfast_client.agent.channel import Channel, ChannelClosed
from holdfast_client.chunks.peer_http import PeerAddress
from holdfast_client.errors import ConfigurationError, HoldfastError, StaleAttempt
from holdfast_client.settings import ClientSettings
from holdfast_protocol.checkpoints import IndexOrdinals, ShardSummary
from holdfast_protocol.states import CheckpointKind
from tests.fuzz.mutations import JSON, altered, damaged

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="agents need Linux")
often = settings(max_examples=1000)

DIGEST = "ab" * 32
CALLER = say.Caller(settings=ClientSettings().model_dump(mode="json", exclude={"token"}), token="hold_1_2")
HAND = say.HandOver(
    project="demo",
    run="gpt",
    epoch=1,
    attempt=2,
    launch_id="launch-1",
    number=3,
    step=20,
    kind=CheckpointKind.PERIODIC,
    world_size=2,
    rank=0,
    memory=1,
    chunks=[say.StagedChunk(start=0, bytes=4096, item_bytes=4, digest=DIGEST)],
    documents=[2],
    index=IndexOrdinals(shard=0, layout=None),
    summary=ShardSummary(components={}),
    retry_seconds=1.0,
)
PEER = PeerAddress("10.0.0.1", 4711, "ab" * 16)
ASKED = [
    say.Hello(
        version=say.VERSION, holdfast="0.1", project="demo", run="gpt", rank=0, host_ranks=1, transfers=2, caller=CALLER
    ),
    say.Share(memory=1, bytes=4096),
    HAND,
    say.Run(number=3, summary=HAND.summary, retry_seconds=1.0),
    say.Release(number=3, digests=[DIGEST, DIGEST]),
    say.Meet(host=0, others=[PEER]),
    say.Bye(is_finished=True),
]
TOLD = [
    say.Welcome(version=say.VERSION, holdfast="0.1", keeps=1),
    say.Ended(number=3, failure=say.Failure.of(StaleAttempt("another attempt")), digests=[DIGEST]),
    say.Lent(chunks=HAND.chunks, documents=[]),
    say.PeerHere(address=PEER, ranks=[0, 1]),
    say.Settled(left=[20]),
]
OFFERED = [
    say.Offer(source=PEER, host=0, host_ranks=1, hand=HAND, digests=[DIGEST, DIGEST]),
    say.Find(project="demo", run="gpt", digests=[DIGEST]),
    say.Found(bytes=[1, None]),
]


def frame(message: Any) -> bytes:
    return message.model_dump_json().encode()


def documents(messages: list[Any]) -> Any:
    """Them with other values in them, and with other bytes."""
    whole = st.sampled_from(messages).map(lambda each: json.loads(frame(each)))
    texts = (whole.flatmap(altered) | JSON).map(lambda value: json.dumps(value).encode())
    return texts | damaged([frame(each) for each in messages])


@often
@given(documents(ASKED))
def test_what_a_rank_asks_is_read_or_refused(text: bytes) -> None:
    with contextlib.suppress(ValidationError):
        asked = say.ASKED.validate_json(text)
        assert say.ASKED.validate_json(frame(asked)) == asked, "what is read can be said again"


@often
@given(st.just(json.loads(frame(CALLER))).flatmap(altered).map(json.dumps))
@example('{"settings": {"token": "hold_3_4"}, "token": "hold_1_2"}')
@example('{"settings": {"_env_file": "/etc/passwd"}, "token": null}')
def test_a_rank_calls_the_service_by_settings_that_are_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValidationError, ConfigurationError):
        caller = say.Caller.model_validate_json(text)
        token = caller.client_settings().token
        assert (None if token is None else token.get_secret_value()) == caller.token


@often
@given(documents(TOLD))
def test_what_an_agent_tells_is_read_or_refused(text: bytes) -> None:
    with contextlib.suppress(ValidationError):
        told = say.TOLD.validate_json(text)
        if isinstance(told, say.Ended) and told.failure is not None:
            error = told.failure.error()
            assert error is None or (isinstance(error, HoldfastError) and str(error) is not None)


@often
@given(documents(OFFERED))
def test_what_an_agent_of_another_host_says_is_read_or_refused(text: bytes) -> None:
    for kind in (say.Offer, say.Find, say.Found):
        with contextlib.suppress(ValidationError):
            kind.model_validate_json(text)


HEAD = struct.Struct("!IQ")
WIRE = [HEAD.pack(len(frame(each)), 4) + frame(each) + b"body" for each in ASKED]


@often
@given(damaged(WIRE) | st.binary(max_size=100))
@example(HEAD.pack(0, 4 * 1024**3))
@example(HEAD.pack(256 * 1024**2, 0))
def test_bytes_on_the_socket_are_a_frame_or_the_end_and_take_no_more_memory_than_has_come(
    sent: bytes,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(ours)
    tracemalloc.start()
    try:
        with theirs:
            theirs.sendall(sent)
        with contextlib.suppress(ChannelClosed):
            while True:
                text, body, descriptor = channel.receive()
                assert descriptor is None
                assert HEAD.size + len(text) + len(body) <= len(sent)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        channel.close()
    assert peak < 8 * 1024**2
