"""What the jobs stand on: Postgres, two services and a worker, two S3 stores, and proxies wherever a reply can be lost.

Both stores are of one SeaweedFS, each behind a proxy of its own, so that one can be away while the other is there.
Everything is started again with the settings of that moment: after a rebuild the services have another database.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

import urllib3
from pydantic import SecretStr

from holdfast_client.agent.process import serves_at
from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_protocol.policies.policy import PolicyKind
from holdfast_protocol.runs import EditProject
from holdfast_service.settings import ServiceSettings
from tests.chaos_run.clock import VARIABLE, DatabaseClock, set_clock
from tests.jepsen.database import FailoverPostgres, failover_postgres
from tests.jepsen.journal import Journal
from tests.jepsen.runner import Runner
from tests.soak.fleet import SETTINGS, Member
from tests.support.fault_proxy import FaultProxy
from tests.support.ports import free_ports
from tests.support.processes import ServerProcess
from tests.support.seaweedfs import SeaweedFS, seaweedfs_server
from tests.support.serve import ENTRY_POINT, HOLDFAST, without_holdfast_settings

PROJECT = "jepsen"
KEEP_LAST = 6
SERVICES = 2
_REPOSITORY = Path(__file__).parents[2]
_COMMAND_SECONDS = 300
_START_SECONDS = 180
"""On a machine that is busy with other things."""
_JOB_SETTINGS = {"HOLDFAST_TIMEOUT_SECONDS": "4", "HOLDFAST_RETRY_SECONDS": "30"}
_SETTINGS = SETTINGS | {
    # Else copies are being read, under leases, whenever anybody looks; people ask for it often enough (keeper.py).
    "HOLDFAST_SCRUB_DAYS": "1",
    # Jobs that are killed at random crash from any checkpoint.
    "HOLDFAST_CRASH_LOOP_ATTEMPTS": "0",
    "HOLDFAST_STORE_UNAVAILABLE_SECONDS": "3",
    "HOLDFAST_LOST_AFTER_SECONDS": "20",
}


class Place:
    """`client` goes around the proxies, to the first service."""

    def __init__(
        self, folder: Path, postgres: FailoverPostgres, weed: SeaweedFS, journal: Journal, agent: Path | None
    ) -> None:
        """`agent`: the socket of one that jobs hand their saves to."""
        self.folder = folder
        self.postgres = postgres
        self.weed = weed
        self.journal = journal
        self.began = time.monotonic()
        self.runners: list[Runner] = []
        self.to_stores = {role: FaultProxy(_port(weed.endpoint)) for role in ("first", "second")}
        self._token = f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"
        self._ports = [free_ports() for _ in range(SERVICES)]
        self.ways: list[FaultProxy] = []
        self.settings = _SETTINGS | {
            "HOLDFAST_DATA_DIR": str(folder / "data"),
            "HOLDFAST_STORE": self._store_url("first"),
            "HOLDFAST_SECOND_STORE": self._store_url("second"),
            "HOLDFAST_BOOTSTRAP_TOKEN": self._token,
        }
        self.new_database()
        self.clocks = {f"service {number + 1}": folder / f"service{number + 1}.clock" for number in range(SERVICES)}
        self.services = [self._service(number) for number in range(SERVICES)]
        self.worker = self._member("worker", "workers", "run", ready=lambda: True)
        self.socket = agent
        self.agent = None if agent is None else Member("agent", lambda: self._agent(agent))
        self.with_agent: list[Runner] = []
        self.client = Client(
            ClientSettings(url=self.urls[0], token=SecretStr(self._token), retry_seconds=60, direct_files=False)
        )

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    @property
    def members(self) -> list[Member]:
        """Of the service."""
        return [*self.services, self.worker]

    def new_database(self) -> None:
        """Empty; what is started from now on uses it. What was called committed outlives a kill of the server."""
        self.database = f"holdfast_jepsen_{secrets.token_hex(6)}"
        plain = self.postgres.server.create_database(self.database)
        self.clock = DatabaseClock(plain)
        self.clock.install()
        options = "options=-csynchronous_commit%3Don"
        self.settings["HOLDFAST_DATABASE_URL"] = f"{plain}{'&' if '?' in plain else '?'}{options}"

    def add_job(self, name: str, seed: int, *, retention: bool, with_agent: bool) -> None:
        number = len(self.runners)
        self.client.projects.edit(PROJECT, EditProject())
        way = FaultProxy(self._ports[number % SERVICES])
        self.ways.append(way)
        environment = {"HOLDFAST_AGENT": str(self.socket)} if with_agent else {}
        runner = Runner(
            f"{PROJECT}/{name}", self.folder, way, lambda: self._job_environment(way) | environment, seed, self.began
        )
        self.runners.append(runner)
        if with_agent:
            self.with_agent.append(runner)
        if retention:
            self.client.runs.create(PROJECT, name)
            self.client.policies.put(PolicyKind.RETENTION, PROJECT, name, {"keep_last": KEEP_LAST})

    def turn_jobs_to(self, number: int) -> None:
        """As a load balancer does that does not see the other services."""
        for way in self.ways:
            way.server_port = self._ports[number]

    def spread_jobs(self) -> None:
        for number, way in enumerate(self.ways):
            way.server_port = self._ports[number % SERVICES]

    def heal(self) -> None:
        """No proxy does anything any more, every clock is right, and everything runs."""
        for way in (*self.ways, *self.to_stores.values()):
            way.accept()
            way.heal()
        for clock in self.clocks.values():
            set_clock(clock, 0)
        self.clock.set(0)
        self.spread_jobs()
        for runner in self.runners:
            runner.go_on()
        if self.agent is not None:
            self.agent.process.signal(signal.SIGCONT)

    def restart(self, *members: Member) -> None:
        """Killed and started again."""
        for member in members:
            member.kill9()
        for member in members:
            member.process = member.start()

    def stop_members(self) -> None:
        for member in self.members:
            member.process.stop()

    def start_members(self) -> None:
        for member in self.members:
            member.process = member.start()

    def readiness(self) -> list[str]:
        """What the services say on /readyz where they do not say that they are ready, one text each."""
        said = []
        for url in self.urls:
            try:
                reply = urllib3.request("GET", f"{url}/readyz", timeout=3, retries=False)
            except urllib3.exceptions.HTTPError:
                continue
            if reply.status == 503:
                checks = json.loads(reply.data)["checks"]
                said.append(" ".join(check["detail"] for check in checks if not check["ok"]))
        return said

    def holdfast(self, *command: str) -> subprocess.CompletedProcess[str]:
        """What an operator types, with the service's settings and an administrator's token."""
        environment = {
            **without_holdfast_settings(),
            **self.weed.environment,
            **self.settings,
            "HOLDFAST_URL": self.urls[0],
            "HOLDFAST_TOKEN": self._token,
        }
        done = subprocess.run(
            [HOLDFAST, *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
        with (self.folder / "operator.log").open("a") as log:
            log.write(f"$ holdfast {' '.join(command)}   -> {done.returncode}\n{done.stdout}{done.stderr}\n")
        return done

    def service_settings(self) -> ServiceSettings:
        """The services' own, for whoever opens catalog and stores beside them. Keys come from the environment."""
        os.environ.update(self.weed.environment)
        prefix = "HOLDFAST_"
        return ServiceSettings(**{name.removeprefix(prefix).lower(): value for name, value in self.settings.items()})

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
        self.client.close()
        for member in [*self.members, *([] if self.agent is None else [self.agent])]:
            member.process.signal(signal.SIGCONT)
            member.process.stop()
        for way in (*self.ways, *self.to_stores.values()):
            way.close()

    def _job_environment(self, way: FaultProxy) -> dict[str, str]:
        return {
            **without_holdfast_settings(),
            **_JOB_SETTINGS,
            "HOLDFAST_URL": way.url,
            "HOLDFAST_TOKEN": self._token,
        }

    def _agent(self, socket: Path) -> ServerProcess:
        """As on a node: it knows nothing of the service."""
        return ServerProcess(
            [ENTRY_POINT, "agent", "serve", "--socket", str(socket)],
            log=self.folder / "agent.log",
            ready=lambda: serves_at(socket),
            env=without_holdfast_settings(),
            start_seconds=_START_SECONDS,
            forked=True,
        )

    def _service(self, number: int) -> Member:
        url = self.urls[number]
        extra = {"HOLDFAST_PORT": str(self._ports[number]), VARIABLE: str(self.clocks[f"service {number + 1}"])}
        return self._member(f"service {number + 1}", "serve", ready=lambda: _lives(url), extra=extra)

    def _member(
        self, name: str, *command: str, ready: Callable[[], bool], extra: dict[str, str] | None = None
    ) -> Member:
        def start() -> ServerProcess:
            return ServerProcess(
                ["tests.chaos_run.serve", *command],
                log=self.folder / f"{name.replace(' ', '-')}.log",
                ready=ready,
                cwd=_REPOSITORY,
                env={**without_holdfast_settings(), **self.weed.environment, **self.settings, **(extra or {})},
                start_seconds=_START_SECONDS,
                forked=True,
            )

        return Member(name, start)

    def _store_url(self, role: str) -> str:
        through = quote(self.to_stores[role].url, safe=":/")
        return self.weed.store_url_for(role).replace(quote(self.weed.endpoint, safe=":/"), through)


@contextmanager
def new_place(folder: Path, journal: Journal, *, with_agent: bool = False) -> Iterator[Place]:
    with ExitStack() as servers:
        # Not below `folder`, whose path may be longer than a socket's can be.
        sockets = servers.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-jepsen-"))
        weed = servers.enter_context(seaweedfs_server())
        postgres = servers.enter_context(failover_postgres())
        place = Place(folder, postgres, weed, journal, Path(sockets) / "agent.sock" if with_agent else None)
        servers.callback(place.close)
        yield place


def _lives(url: str) -> bool:
    """Not: is ready. What finds that its database went back is not, and goes on."""
    try:
        return urllib3.request("GET", f"{url}/healthz", timeout=2, retries=False).status == 200
    except urllib3.exceptions.HTTPError:
        return False


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port
