"""One training run under a launcher: whenever its processes have ended, the same command is started again, as a cluster
does. Whoever makes them end says so first, so that an end that nobody made is found."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from examples.demo.launches import Launch, launch_environment

from tests.chaos_run.journal import JournalReader, LaunchRecord
from tests.chaos_run.nodes import Nodes
from tests.chaos_run.place import PROJECT, Place
from tests.chaos_run.trainer import UNTIL
from tests.support.fault_proxy import FaultProxy
from tests.support.serve import HOLDFAST

_LOOK_EVERY_SECONDS = 0.05
_RELAUNCH_SECONDS = 0.5
GRACE_SECONDS = 12
"""From SIGTERM to SIGKILL."""


@dataclass(frozen=True)
class End:
    """Of one launch. `by`: what was done to it; empty where it ended by itself."""

    launch: int
    code: int
    at: float
    by: str
    last_words: list[str]


class Torchrun(Launch):
    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def wait(self) -> int:
        return int(self._process.wait())


class Job:
    """`launches`, `last_step` and what reads the journal are for one thread; ends and kills for any."""

    def __init__(
        self,
        place: Place,
        name: str,
        *,
        seed: int,
        local: Path | None = None,
        ranks: int = 2,
        nodes: Nodes | None = None,
    ) -> None:
        """`nodes`: each rank is on one of its own, with an agent, and a local tier of its own below `local`."""
        self.name = name
        self.run = f"{PROJECT}/{name}"
        self.seed = seed
        self.local = local
        self.ranks = ranks
        self.nodes = nodes
        self.folder = place.folder / name
        self.folder.mkdir()
        self.ends: list[End] = []
        self.killed_ranks: dict[int, int] = {}
        """By launch, the rank that was killed alone."""
        self.way: FaultProxy = place.way_to_service()
        self._environment = launch_environment(place.environment(self.way), {}, temporary=self.folder)
        self._journal = JournalReader(self.folder)
        self._lock = threading.RLock()
        self._launch: Torchrun | None = None
        self._number = 0
        self._by: dict[int, str] = {}
        self._may_launch = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._over.clear()
        self._may_launch.set()
        self._thread = threading.Thread(target=self._keep_running, name=f"launcher-{self.name}", daemon=True)
        self._thread.start()

    def finish_at(self, step: int) -> None:
        """Every rank ends by itself before it trains `step`."""
        fresh = self.folder / "until.new"
        fresh.write_text(str(step))
        fresh.replace(self.folder / UNTIL)

    def wait_finished(self, retry_deadline_seconds: float) -> bool:
        assert self._thread is not None
        self._thread.join(retry_deadline_seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Whatever it does."""
        self._over.set()
        self._may_launch.set()
        self.kill("the chaos run is over")
        if self._thread is not None:
            self._thread.join()

    def kill(self, by: str) -> None:
        """SIGKILL to torchrun and all ranks."""
        with self._lock:
            if self._launch is not None and self._launch.exit_code is None:
                self._by.setdefault(self._number, by)
                self._launch.kill()

    def kill_rank(self, rank: int, by: str) -> bool:
        """SIGKILL to one rank; false if it does not run."""
        with self._lock:
            pid = self._rank_pid(rank)
            if pid is None:
                return False
            if self._by.setdefault(self._number, by) == by:
                self.killed_ranks.setdefault(self._number, rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return True

    def limit_files(self, most_bytes: int) -> int:
        """The largest file that each rank may write from now on; how many ranks there are to be told so."""
        with self._lock:
            pids = [pid for rank in range(self.ranks) if (pid := self._rank_pid(rank)) is not None]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
            return len(pids)

    def terminate(self, by: str) -> None:
        """SIGTERM to `holdfast launch`, which passes it on; SIGKILL to whatever is left after the deadline."""
        with self._lock:
            launch = self._launch
            if launch is None or launch.exit_code is not None:
                return
            self._by.setdefault(self._number, by)
            os.kill(launch.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while launch.exit_code is None and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_SECONDS)
        launch.kill()

    @contextlib.contextmanager
    def held_down(self, by: str) -> Iterator[None]:
        """Killed, and not launched again before the block is over."""
        with self.not_launched():
            self.kill(by)
            yield

    @contextlib.contextmanager
    def not_launched(self) -> Iterator[None]:
        """No launch begins before the block is over."""
        self._may_launch.clear()
        try:
            yield
        finally:
            self._may_launch.set()

    def dump_stacks(self) -> str:
        """What the ranks are doing, from the end of their log."""
        for rank in range(self.ranks):
            with self._lock, contextlib.suppress(ProcessLookupError):
                if (pid := self._rank_pid(rank)) is not None:
                    os.kill(pid, signal.SIGUSR2)
        time.sleep(2)
        return self.log.read_text(errors="replace")[-12_000:]

    @property
    def log(self) -> Path:
        return self.folder / "launches.log"

    @property
    def number(self) -> int:
        """Of the newest launch."""
        return self._number

    def launches(self, rank: int = 0) -> list[LaunchRecord]:
        return self._journal.launches() if rank == 0 else JournalReader(self.folder, rank).launches()

    def last_step(self) -> int:
        """The largest that any launch has trained; -1 before the first."""
        return max((step for each in self.launches() if (step := each.last_step) is not None), default=-1)

    def last_sign(self) -> float:
        """When its journal last had a new line of any launch."""
        signs = [0.0]
        for each in self.launches():
            signs += [each.steps[-1].at] if each.steps else [] if each.begun_at is None else [each.begun_at]
        return max(signs)

    def command(self) -> list[str]:
        return [
            *(HOLDFAST, "launch", f"--grace={GRACE_SECONDS}", "--"),
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"),
            *("-m", "tests.chaos_run.trainer", self.run, str(self.folder), str(self._number), f"--seed={self.seed}"),
            *([f"--tier={self.local}"] if self.local else []),
            *([f"--agents={self.nodes.sockets}"] if self.nodes else []),
        ]

    def _keep_running(self) -> None:
        while not self._over.is_set():
            self._may_launch.wait()
            with self._lock:
                if self._over.is_set():
                    return
                self._number += 1
                launch = self._launch = Torchrun(self.command(), environment=self._environment, log=self.log)
            code = launch.wait()
            with self._lock:
                launch.kill()  # ranks that an agent has left behind
                by = self._by.get(self._number, "")
                words = launch.last_words if code and not by else []
                self.ends.append(End(self._number, code, time.monotonic(), by, words))
            if code == 0:
                return
            self._over.wait(_RELAUNCH_SECONDS)

    def _rank_pid(self, rank: int) -> int | None:
        """Of the launch that runs; torchrun's workers know their rank by their environment."""
        launch = self._launch
        if launch is None or launch.exit_code is not None:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(launch.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if process.environ().get("RANK") == str(rank) and process.status() != psutil.STATUS_ZOMBIE:
                        return int(process.pid)
        return None
