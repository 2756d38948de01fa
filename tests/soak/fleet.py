"""The processes of a soak, each of which may be killed and is then started again with the same command."""

from __future__ import annotations

import itertools
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import urllib3

from holdfast_client.agent.process import serves_at
from tests.support.ports import free_ports
from tests.support.postgres import postgres_server
from tests.support.processes import ServerProcess
from tests.support.seaweedfs import seaweedfs_server
from tests.support.serve import ENTRY_POINT, without_holdfast_settings

TICKET_SECONDS, LONGEST_UPLOAD_SECONDS = 6, 4
"""An orphan is old enough after their sum: short, so that a soak of minutes sees what takes hours elsewhere."""

SETTINGS = {
    "HOLDFAST_TICKET_SECONDS": str(TICKET_SECONDS),
    "HOLDFAST_LONGEST_UPLOAD_SECONDS": str(LONGEST_UPLOAD_SECONDS),
    "HOLDFAST_READ_LEASE_SECONDS": "5",
    "HOLDFAST_UPLOAD_IDLE_SECONDS": "10",
    "HOLDFAST_LOST_AFTER_SECONDS": "50",
    "HOLDFAST_CONTROLLER_INTERVAL_SECONDS": "0.5",
    "HOLDFAST_LEASE_SECONDS": "6",
    "HOLDFAST_CHUNK_LEASE_SECONDS": "6",
    "HOLDFAST_COLLECT_FULL_SCAN_SECONDS": "20",
    "HOLDFAST_SWEEP_INTERVAL_SECONDS": "15",
    "HOLDFAST_SCRUB_DAYS": "0.001",
    "HOLDFAST_RETENTION_INTERVAL_SECONDS": "2",
    "HOLDFAST_TRASH_POLICY_SECONDS": "3",
    "HOLDFAST_TRASH_PERSON_SECONDS": "6",
    "HOLDFAST_LOG_FORMAT": "json",
}


@dataclass
class Member:
    """One process and what it takes to start it again. `kills` counts how often it was killed."""

    name: str
    start: Callable[[], ServerProcess]
    process: ServerProcess = field(init=False)
    kills: int = 0

    def __post_init__(self) -> None:
        self.process = self.start()

    def kill9(self) -> None:
        self.process.kill9()
        self.kills += 1

    @property
    def kind(self) -> str:
        return self.name.split(" ")[0]


class Fleet:
    """`environment` is all that a client needs; `settings` are the service's own, for whoever opens its stores."""

    def __init__(self, folder: Path, settings: dict[str, str], project: str, seed: int, sockets: Path) -> None:
        """`sockets`: where agents listen. A path below `folder` may be longer than a socket's can be."""
        self.folder = folder
        self.faults: list[str] = []
        self._sockets = sockets
        self._agent_of: dict[str, str] = {}
        self.settings = settings
        self.project = project
        self.members: list[Member] = []
        self._seeds = itertools.count(seed)
        port = settings["HOLDFAST_PORT"]
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {
            "HOLDFAST_URL": self.url,
            "HOLDFAST_TOKEN": settings["HOLDFAST_BOOTSTRAP_TOKEN"],
            "HOLDFAST_RETRY_SECONDS": "60",
        }

    def add_service(self) -> None:
        self._add("service", [ENTRY_POINT, "serve"], self.settings, self._answers)

    def add_worker(self, number: int) -> None:
        # A worker says nothing when it is ready; whether it works is seen by what it does.
        self._add(f"worker {number}", [ENTRY_POINT, "workers", "run"], self.settings, lambda: True)

    def add_agent(self, number: int) -> None:
        """As on a node: it knows nothing of the service."""
        name = f"agent {number}"
        socket = self._socket(name)
        self._add(name, [ENTRY_POINT, "agent", "serve", "--socket", str(socket)], {}, lambda: serves_at(socket))

    def add_writer(self, run: str, agent: int | None = None) -> None:
        """`agent`: the number of the one that it hands its saves to."""
        name, environment = f"writer {run}", self.environment
        if agent is not None:
            self._agent_of[name] = f"agent {agent}"
            environment = environment | {"HOLDFAST_AGENT": str(self._socket(f"agent {agent}"))}
        self._add_client(name, "tests.soak.writer", f"{self.project}/{run}", environment)

    def add_reader(self, number: int) -> None:
        self._add_client(f"reader {number}", "tests.soak.reader", self.project, self.environment)

    def jobs_of(self, agent: Member) -> list[Member]:
        """The writers that hand their saves to it."""
        return [member for member in self.members if self._agent_of.get(member.name) == agent.name]

    def _socket(self, agent: str) -> Path:
        return self._sockets / f"{agent.replace(' ', '-')}.sock"

    def _add_client(self, name: str, module: str, subject: str, environment: dict[str, str]) -> None:
        def start() -> ServerProcess:
            command = [module, subject, str(self.folder), str(next(self._seeds))]
            return self._process(name, command, environment, lambda: True)

        self.members.append(Member(name, start))

    def _add(self, name: str, command: list[str], settings: dict[str, str], ready: Callable[[], bool]) -> None:
        self.members.append(Member(name, lambda: self._process(name, command, settings, ready)))

    def _process(
        self, name: str, command: list[str], settings: dict[str, str], ready: Callable[[], bool]
    ) -> ServerProcess:
        return ServerProcess(
            command, log=self._log(name), ready=ready, env=without_holdfast_settings() | settings, forked=True
        )

    def _log(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.log"

    def _answers(self) -> bool:
        try:
            return urllib3.request("GET", f"{self.url}/readyz", timeout=2, retries=False).status == 200
        except urllib3.exceptions.HTTPError:
            return False

    def kills(self) -> Counter[str]:
        killed: Counter[str] = Counter()
        for member in self.members:
            killed[member.kind] += member.kills
        return killed

    def revive_the_ended(self) -> None:
        """A job that was fenced, or ended, is launched again, as a cluster does."""
        for member in self.members:
            if not member.process.runs:
                if member.kind == "agent":
                    self.faults.append(f"{member.name} has ended by itself: {member.process.log_text[-1000:]}")
                member.process = member.start()

    def end_clients(self, retry_deadline_seconds: float) -> None:
        """They find the file `stop` between two steps. Their agents end after them, and with all that they have."""
        (self.folder / "stop").touch()
        deadline = time.monotonic() + retry_deadline_seconds
        for member in self.members:
            if member.kind in {"writer", "reader"}:
                member.process.wait(max(0.1, deadline - time.monotonic()))
        for member in self.members:
            if member.kind == "agent":
                member.process.stop()

    def finished_by_agents(self) -> Counter[str]:
        """What they have said of the saves of killed jobs, for the table."""
        said = [self._log(member.name).read_text() for member in self.members if member.kind == "agent"]
        counts = {
            "shards of killed jobs: committed by the agent": "committed for a rank that is gone",
            "shards of killed jobs: dropped, the run had gone on": "dropped, because the run has gone on",
            "shards of killed jobs: not committed": "not committed for a rank that is gone",
        }
        return Counter({what: count for what, words in counts.items() if (count := sum(t.count(words) for t in said))})

    def stop(self) -> None:
        for member in self.members:
            member.process.stop()


@contextmanager
def new_fleet(folder: Path, *, seed: int, second_store: bool = True) -> Iterator[Fleet]:
    """Postgres and SeaweedFS are up, nothing else is yet."""
    with ExitStack() as servers:
        weed = servers.enter_context(seaweedfs_server())
        postgres = servers.enter_context(postgres_server())
        name = f"holdfast_soak_{secrets.token_hex(6)}"
        url = postgres.create_database(name)
        servers.callback(postgres.drop_database, name)
        settings = (
            SETTINGS
            | weed.environment
            | {
                "HOLDFAST_DATA_DIR": str(folder / "data"),
                # What is called committed must outlive a kill; only the machine itself is not killed here.
                "HOLDFAST_DATABASE_URL": url,
                "HOLDFAST_STORE": weed.store_url_for("first"),
                "HOLDFAST_PORT": str(free_ports()),
                "HOLDFAST_BOOTSTRAP_TOKEN": f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}",
            }
        )
        if second_store:
            settings["HOLDFAST_SECOND_STORE"] = weed.store_url_for("second")
        sockets = servers.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-soak-"))
        fleet = Fleet(folder, settings, "soak", seed, Path(sockets))
        servers.callback(fleet.stop)
        yield fleet
