"""How fast the replacement of a lost host reads the newest state in the memory of another host's agent, over a link of
a bounded rate.

    two hosts, an agent each, save -> the agent of host 0 is killed, when the other one has its copy
    the relaunch, with a new agent on host 0 -> rank 0 restores through a relay, which is the link
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from tests.support.node_agent import ServedAgent, agent_serve
from tests.support.tcp_relay import tcp_relay

from benchmarks.cases.on_host import address_of
from benchmarks.processes import Failed, Figures, measured
from benchmarks.servers import Servers
from benchmarks.spec import Spec
from holdfast_client.agent.link import status_of
from holdfast_client.chunks.connections import RateLimit

LINK_BYTES_PER_SECOND = 250_000_000
"""2 Gbit/s: both hosts, the relay and SHA-256 share the cores of one machine."""
_HOSTS = 2
_COPIED_WITHIN_SECONDS = 120


def peer_restore(spec: Spec, started: Servers) -> Figures | Failed:
    """Figures of the lost host's rank, with `link_bytes_per_second` and `link_bytes`, what came through it."""
    environment = started.environment | {"HOLDFAST_SWARM": "false"}  # which has other ways between hosts
    with _agent(started, 0) as lost, _agent(started, 1) as kept:
        options = {"ranks_of_a_host": 1, "agents": [str(lost.socket), str(kept.socket)]}
        save = replace(spec, case="on_host", options=options | {"case": "holdfast_save", "relaunched": True})
        saved = measured(Path(sys.executable), save, environment, ranks=_HOSTS)
        if isinstance(saved, Failed):
            return Failed(f"its save failed: {saved.why}")
        if not _has_a_copy(kept, saved["number"]):
            return Failed(f"the other agent had no copy within {_COPIED_WITHIN_SECONDS} s")
        lost.process.kill9()
        with ExitStack() as stack:
            replacement = stack.enter_context(_agent(started, 0, number=1))
            port = _port(kept)
            relay = stack.enter_context(tcp_relay(address_of(1), port))
            relay.answers = RateLimit(LINK_BYTES_PER_SECOND)
            options |= {"agents": [str(replacement.socket), str(kept.socket)], "link": [port, relay.port]}
            options |= {"case": "holdfast_restore", "fingerprint": saved["fingerprint"], "number": saved["number"]}
            restored = measured(Path(sys.executable), replace(save, options=options), environment, ranks=_HOSTS)
            if isinstance(restored, Failed):
                return restored
            figures: dict[str, Any] = {
                "link_bytes_per_second": LINK_BYTES_PER_SECOND,
                "link_bytes": relay.answered_bytes,
            }
            if relay.answered_bytes < restored["bytes"]:
                return Failed(f"only {relay.answered_bytes} of {restored['bytes']} bytes came over the link")
            return restored | figures


@contextmanager
def _agent(started: Servers, host: int, number: int = 0) -> Iterator[ServedAgent]:
    log = started.folder / f"agent-{host}-{number}.log"
    with agent_serve(log, "--peers", "1", address=address_of(host), forked=False) as served:
        yield served


def _has_a_copy(agent: ServedAgent, step: int) -> bool:
    """Of host 0's last step, committed."""
    until = time.monotonic() + _COPIED_WITHIN_SECONDS
    while time.monotonic() < until:
        if any(it.step == step and it.copy_of == 0 and it.is_committed for it in status_of(agent.socket).kept):
            return True
        time.sleep(0.05)
    return False


def _port(agent: ServedAgent) -> int:
    """Where other hosts reach it."""
    connections = psutil.Process(agent.process.pid).net_connections("tcp")
    [port] = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    return int(port)
