"""Another case as one rank of a job on several hosts, which are loopback addresses of this machine.

Options: `case`; `ranks_of_a_host`; `agents`, the socket of each host's, if they have some; `link`, if the first host
reaches the agent of another one through a relay: the agent's port, and the relay's.
"""

from __future__ import annotations

import importlib
import os
import socket
from dataclasses import replace
from typing import Any

from benchmarks.spec import Spec
from holdfast_client.agent import peer_chunks
from holdfast_client.chunks.peer_http import PeerAddress


def run(spec: Spec) -> dict[str, Any]:
    options = spec.options
    host = int(os.environ["RANK"]) // options["ranks_of_a_host"]
    socket.gethostname = lambda: f"host{host}"
    os.environ["HOLDFAST_SWARM_ADDRESS"] = address_of(host)
    if "agents" in options:
        os.environ["HOLDFAST_AGENT"] = options["agents"][host]
    if "link" in options and host == 0:
        _reach_through(*options["link"])
    figures: dict[str, Any] = importlib.import_module(f"benchmarks.cases.{options['case']}").run(spec)
    return figures


def address_of(host: int) -> str:
    return f"127.0.0.{host + 2}"


def _reach_through(port: int, relay_port: int) -> None:
    connect = peer_chunks.connect

    def connect_through(peer: PeerAddress) -> socket.socket:
        return connect(replace(peer, host="127.0.0.1", port=relay_port) if peer.port == port else peer)

    peer_chunks.connect = connect_through
