"""One run under a launcher that starts the job again whenever it has ended. Its predecessors may go on beside it: a
cluster that has lost sight of a node starts the job elsewhere, and the first one knows nothing of that."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

from tests.support.fault_proxy import FaultProxy
from tests.support.processes import ServerProcess

_REPOSITORY = Path(__file__).parents[2]


class Runner:
    """`way`: this job's own way to a service, which can be turned to another one as a load balancer does."""

    def __init__(
        self,
        run: str,
        folder: Path,
        way: FaultProxy,
        environment: Callable[[], dict[str, str]],
        seed: int,
        began: float,
    ) -> None:
        self.run = run
        self.name = run.rpartition("/")[2]
        self.way = way
        self.launches = 0
        self._folder = folder
        self._environment = environment
        self._seed = seed
        self._began = began
        self._older: list[ServerProcess] = []
        self._lock = threading.Lock()
        self._newest = self._start()

    def revive(self) -> None:
        with self._lock:
            if not self._newest.runs:
                self._newest = self._start()

    def kill9(self) -> None:
        """The newest launch, and at once another one."""
        with self._lock:
            self._newest.kill9()
            self._newest = self._start()

    def launch_beside(self) -> None:
        """Another launch, while the newest goes on."""
        with self._lock:
            self._older = [each for each in self._older if each.runs] + [self._newest]
            self._newest = self._start()

    def pause(self) -> None:
        self._newest.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        for each in (*self._older, self._newest):
            each.signal(signal.SIGCONT)

    def end(self, retry_deadline_seconds: float) -> None:
        """When the folder has the file `stop`."""
        self.go_on()
        for each in (*self._older, self._newest):
            each.wait(retry_deadline_seconds)

    def close(self) -> None:
        for each in (*self._older, self._newest):
            each.kill9()

    def _start(self) -> ServerProcess:
        self.launches += 1
        numbers = (str(self._seed * 10_000 + self.launches), repr(self._began))
        return ServerProcess(
            ["tests.jepsen.job", self.run, str(self._folder), *numbers],
            log=self._folder / f"job-{self.name}.log",
            ready=lambda: True,
            cwd=_REPOSITORY,
            env=self._environment(),
            forked=True,
        )
