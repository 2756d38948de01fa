"""What the agent of a node says of itself, for Prometheus. Needs the package prometheus-client."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast_client.agent.messages import Status
from holdfast_client.errors import ConfigurationError


def serve_metrics(address: str, status: Callable[[], Status]) -> None:
    """Answers `GET /metrics` at `address`, HOST:PORT, on a thread of its own until this process ends. Raises
    ConfigurationError."""
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    registry.register(_AgentMetrics(status))
    try:
        if not host:
            raise ValueError("it names no host")
        start_http_server(int(port), addr=host.strip("[]"), registry=registry)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"Metrics cannot be served at {address!r} ({error}). Name a host of this machine and a free port, such as "
            "127.0.0.1:9464."
        ) from error


class _AgentMetrics(Collector):
    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        found = self._status()
        dead = sum(not part.rank_lives for part in found.held)
        held = GaugeMetricFamily(
            "holdfast_agent_held_parts", "Ranks' parts of saves that the agent holds.", labels=("rank",)
        )
        held.add_metric(("alive",), len(found.held) - dead)
        held.add_metric(("dead",), dead)
        yield held
        for name, text, value in (
            ("memory_bytes", "Staging memory that ranks share with the agent.", found.memory_bytes),
            ("memory_limit_bytes", "The most that they may share (--memory).", found.memory_limit_bytes),
            ("kept_bytes", "Last states that stay in it for a relaunch.", sum(state.bytes for state in found.kept)),
            ("kept_states", "How many these are.", len(found.kept)),
            ("ranks", "Ranks that are connected, or dead with parts that are not finished.", found.ranks),
        ):
            yield GaugeMetricFamily(f"holdfast_agent_{name}", text, value)
        counts = found.counts
        for name, text, value in (
            ("taken_parts", "Parts that ranks have handed over.", counts.taken),
            ("tries", "Tries to upload and seal a part.", counts.tries),
            ("failed_tries", "Tries that failed.", counts.failed_tries),
            ("finished_parts", "Parts of dead ranks that were committed.", counts.finished),
            ("given_up_parts", "Parts of dead ranks that were not committed.", counts.given_up),
        ):
            yield CounterMetricFamily(f"holdfast_agent_{name}", text, value)
