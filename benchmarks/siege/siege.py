"""A service on Postgres, a project that saves, and an attack that is begun and ended."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.support.rank import Job
from tests.support.serve import ServedHoldfast, holdfast_serve

from benchmarks.measure import cpu_seconds_of_tree
from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION

_REPOSITORY = Path(__file__).resolve().parents[2]
SETTINGS = {
    "HOLDFAST_HEADER_SECONDS": "600",  # else halves end by themselves, and only fresh ones are there
    "HOLDFAST_PROJECT_REQUESTS": "32",  # fewer than the greedy calls at once
}
"""The others are as they come: 5000 connections at a time."""
GREEDY_PER_SECOND = 10.0
"""Of the greedy project's token, as an operator limits one that is known to be greedy. Without it two projects that ask
for all that a process can do get a half each."""
FLOOD_PER_SECOND = 100.0
"""So many wrong tokens, of which each hangs up."""
SAVERS = 4
SAVED = "saves"


BAR = 0.8
"""So much of the rate another project ought to keep. Nothing fails on it."""


def unsent(halves_open: int, counted: Mapping[str, int]) -> list[str]:
    """The kinds of attack that were not there while `counted` was counted: then nothing was measured."""
    # The flood is refused, and so is what the greedy project calls beyond its limit.
    done = {
        "halves": halves_open,
        "wrong": min(counted.get(each, 0) for each in ("wrong sent", "wrong hung up", "wrong 429")),
        "greedy": min(counted.get("greedy sent", 0), counted.get("greedy 200", 0) + counted.get("greedy 429", 0)),
    }
    return [kind for kind, count in done.items() if count <= 0]


@dataclass(frozen=True)
class Saves:
    """`ids` of the checkpoints, as the service named them when it said that they were committed."""

    ids: list[str]
    seconds: float
    cpu_seconds: dict[str, float]
    """Of the service, of this process, which saves, and of who attacks."""

    @property
    def per_second(self) -> float:
        return len(self.ids) / self.seconds


class Besieged:
    """A service. `save` is another project's work, before and during an attack."""

    def __init__(self, service: ServedHoldfast, greedy_per_second: float | None, savers: int, rate: float) -> None:
        self.service = service
        self._savers = savers
        self._pause = savers / rate if rate else 0.0
        self._greedy_per_second = greedy_per_second
        self._all = self.http(service.environment["HOLDFAST_TOKEN"])
        for project in (SAVED, "greedy"):
            self._all.put(f"/v1/projects/{project}", json={}, headers={"If-Match": "*"}).raise_for_status()
        self._saver = self.http(self.token(SAVED))
        self._jobs = [Job(self._saver, f"{SAVED}/run-{number}") for number in range(savers)]
        self._steps = Counter[int]()
        self._attackers_pid: int | None = None

    def http(self, token: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}", PROTOCOL_HEADER: PROTOCOL_VERSION}
        return httpx.Client(base_url=self.service.url, headers=headers, timeout=120)

    def token(self, project: str, per_second: float | None = None) -> str:
        wanted = {"name": project, "scopes": ["train", "read"], "project": project, "requests_per_second": per_second}
        made = self._all.post("/v1/tokens", json=wanted)
        made.raise_for_status()
        return str(made.json()["token"])

    def save(self, each: int) -> Saves:
        """So many saves of each job, beside each other. Raises where one is not committed."""

        def saves(number: int) -> list[str]:
            ids: list[str] = []
            next_at = time.monotonic()
            for _ in range(each):
                time.sleep(max(0.0, next_at - time.monotonic()))
                next_at = time.monotonic() + self._pause
                self._steps[number] += 1
                view = self._jobs[number].save(self._steps[number])
                assert view["state"] == "committed", view
                ids.append(view["id"])
            return ids

        spent, began = self._cpu_seconds(), time.monotonic()
        with ThreadPoolExecutor(self._savers) as pool:
            ids = [one for of_job in pool.map(saves, range(self._savers)) for one in of_job]
        seconds, ended = time.monotonic() - began, self._cpu_seconds()
        return Saves(ids, seconds, {name: round(ended[name] - spent[name], 2) for name in ended})

    def _cpu_seconds(self) -> dict[str, float]:
        spent = {"service": cpu_seconds_of_tree(self.service.process.pid), "savers": time.process_time()}
        attackers = self._attackers_pid
        return spent | ({} if attackers is None else {"attackers": cpu_seconds_of_tree(attackers)})

    def close(self) -> None:
        self._all.close()
        self._saver.close()

    def state_of(self, checkpoint_id: str) -> str:
        reply = self._saver.get(f"/v1/checkpoints/{checkpoint_id}")
        reply.raise_for_status()
        return str(reply.json()["state"])

    def connections(self) -> int:
        """As the service's process has them."""
        process = psutil.Process(self.service.process.pid)
        port = int(self.service.url.rpartition(":")[2])
        return sum(1 for each in process.net_connections("tcp") if each.laddr.port == port and each.raddr)

    @contextmanager
    def attacked(self, connections: int, flood_per_second: float = FLOOD_PER_SECOND) -> Iterator[Attackers]:
        command = [sys.executable, "-m", "benchmarks.siege.attack", self.service.url.rpartition(":")[2]]
        greedy = self.token("greedy", self._greedy_per_second)
        process = subprocess.Popen(
            [*command, str(connections), str(flood_per_second), greedy],
            cwd=_REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # see take_what_is_left
        )
        attackers, self._attackers_pid = Attackers(process), process.pid
        try:
            yield attackers
        finally:
            self._attackers_pid = None
            attackers.end()


class Attackers:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.counted: dict[str, Any] = {}
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def until(self, holds: Callable[[dict[str, Any]], bool], seconds: float = math.inf) -> None:
        """Or for so long. Raises RuntimeError if they end before."""
        ends = time.monotonic() + seconds
        while not holds(self.counted) and time.monotonic() < ends:
            if self._process.poll() is not None:
                raise RuntimeError(f"the attack ended with {self._process.returncode}, after {self.counted}")
            time.sleep(0.1)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.counted = json.loads(line)


@contextmanager
def besieged(
    folder: Path, greedy_per_second: float | None = GREEDY_PER_SECOND, savers: int = SAVERS, rate: float = 0.0
) -> Iterator[Besieged]:
    """`rate`: saves a second of all savers; 0: each begins the next one at once."""
    with holdfast_serve(folder, database="postgres", other_settings=SETTINGS, forked=False) as service:
        place = Besieged(service, greedy_per_second, savers, rate)
        try:
            yield place
        finally:
            place.close()
