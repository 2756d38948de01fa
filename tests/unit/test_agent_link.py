"""A rank's side of the node agent, where two of its threads meet."""

from __future__ import annotations

import os
import socket

import pytest

from holdfast_client.agent import messages as say
from holdfast_client.agent.channel import Channel, ChannelClosed
from holdfast_client.agent.link import HandedSave, _Link
from holdfast_client.agent.shared_memory import SharedMemory
from holdfast_client.errors import TransferStopped
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
    link = _Link(ours)
    memory = SharedMemory(4096)
    handed = HandedSave(link, memory, 1, 0.0)
    with pytest.raises(TransferStopped):
        handed.write(Leaving(handed), ShardSummary(components={}))
    link.close()
    assert [type(each) for each in frames(theirs)] == [say.Run]
    memory.close()
    theirs.close()
