"""The nodes of a job, each with one rank: a node's agent is a process of its own at an address of its own, and keeps
copies of the states of the node before it in memory."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.chaos_run.trainer import node_name, socket_on
from tests.support.node_agent import agent_serve

_addresses = (f"127.9.{number // 250}.{number % 250 + 1}" for number in itertools.count())
"""Never the same twice: a lost node's replacement is another machine."""


class Nodes:
    """A context manager: no agent outlives its block. For one thread, once its job runs."""

    def __init__(self, logs: Path, count: int) -> None:
        """`logs`: a new folder, in which each agent has its log."""
        logs.mkdir()
        self._logs = logs
        self._count = count
        self._started = itertools.count(1)
        self._agents = [ExitStack() for _ in range(count)]

    def __enter__(self) -> Self:
        # A socket's path is short.
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-nodes-")
        self.sockets = Path(self._folder.name)
        try:
            for node in range(self._count):
                self.start_agent(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in range(self._count):
            self.kill_agent(node)
        self._folder.cleanup()

    def start_agent(self, node: int) -> None:
        """Returns when it takes saves. It has nothing in memory."""
        log = self._logs / f"agent-{node_name(node)}-{next(self._started):03d}.log"
        agent = agent_serve(log, "--peers", "1", socket=socket_on(self.sockets, node), address=next(_addresses))
        self._agents[node].enter_context(agent)

    def kill_agent(self, node: int) -> None:
        """SIGKILL. Nothing where none runs."""
        self._agents[node].close()
