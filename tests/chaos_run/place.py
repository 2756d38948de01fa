"""Everything that the jobs need and that may fail: Postgres, SeaweedFS, the service, and proxies in front of them."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_service.settings import ServiceSettings
from tests.chaos_run.clock import VARIABLE, DatabaseClock
from tests.support.fault_proxy import FaultProxy
from tests.support.ports import free_ports
from tests.support.postgres import OwnPostgresServer, postgres_server
from tests.support.processes import ServerProcess
from tests.support.seaweedfs import SeaweedFS, seaweedfs_server
from tests.support.serve import is_ready, without_holdfast_settings

PROJECT = "chaos"
HEARTBEAT_SECONDS = 2
_REPOSITORY = Path(__file__).parents[2]
_SETTINGS = {
    "HOLDFAST_TICKET_SECONDS": "60",
    "HOLDFAST_UPLOAD_IDLE_SECONDS": "20",
    "HOLDFAST_LOST_AFTER_SECONDS": str(10 * HEARTBEAT_SECONDS),
    "HOLDFAST_CONTROLLER_INTERVAL_SECONDS": "1",
    "HOLDFAST_LEASE_SECONDS": "10",
    "HOLDFAST_CHUNK_LEASE_SECONDS": "10",
    "HOLDFAST_RETENTION_INTERVAL_SECONDS": "5",
    "HOLDFAST_TRASH_POLICY_SECONDS": "20",
    "HOLDFAST_LOG_FORMAT": "json",
}
_JOB_SETTINGS = {
    "HOLDFAST_TIMEOUT_SECONDS": "5",
    "HOLDFAST_RETRY_SECONDS": "60",
    "HOLDFAST_COLLECTIVE_TIMEOUT_SECONDS": "120",
}


class Place:
    """`client` goes around the proxies; so do the service's own ways to its database and its store."""

    def __init__(self, folder: Path, postgres: OwnPostgresServer, weed: SeaweedFS) -> None:
        self.folder = folder
        self.postgres = postgres
        self.weed = weed
        self.service_clock, self.job_clock = folder / "service.clock", folder / "jobs.clock"
        # What was called committed must outlive a kill of the database; the tests' own settings are quicker than that.
        plain = postgres.create_database(f"holdfast_chaos_{secrets.token_hex(6)}")
        self.database_url = f"{plain}{'&' if '?' in plain else '?'}options=-csynchronous_commit%3Don"
        self.database_clock = DatabaseClock(plain)
        self.database_clock.install()
        self._port = free_ports()
        self._token = f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"
        self.url = f"http://127.0.0.1:{self._port}"
        self.to_store = FaultProxy(_port(weed.endpoint))
        self.settings = _SETTINGS | {
            "HOLDFAST_DATA_DIR": str(folder / "data"),
            "HOLDFAST_DATABASE_URL": self.database_url,
            "HOLDFAST_STORE": f"{weed.store_url}&public_endpoint={self.to_store.url}",
            "HOLDFAST_PORT": str(self._port),
            "HOLDFAST_BOOTSTRAP_TOKEN": self._token,
        }
        self._ways: list[FaultProxy] = []
        self.service = self._serve()
        self.client = Client(
            ClientSettings(url=self.url, token=SecretStr(self._token), retry_seconds=60, direct_files=False)
        )

    def way_to_service(self) -> FaultProxy:
        """A job's own way there: each can be cut by itself."""
        way = FaultProxy(self._port)
        self._ways.append(way)
        return way

    def environment(self, way: FaultProxy) -> dict[str, str]:
        """Of a job that goes this way."""
        return {
            **without_holdfast_settings(),
            **_JOB_SETTINGS,
            "HOLDFAST_URL": way.url,
            "HOLDFAST_TOKEN": self._token,
            VARIABLE: str(self.job_clock),
        }

    def restart_service(self, unavailable_seconds: float) -> None:
        self.service.kill9()
        time.sleep(unavailable_seconds)
        self.service = self._serve()

    def restart_database(self, unavailable_seconds: float) -> None:
        self.postgres.kill9()
        time.sleep(unavailable_seconds)
        self.postgres.restart()

    def restart_store(self, unavailable_seconds: float) -> None:
        self.weed.kill9()
        time.sleep(unavailable_seconds)
        self.weed.start()

    def heal_network(self) -> None:
        for way in (*self._ways, self.to_store):
            way.accept()
            way.heal()

    def service_settings(self) -> ServiceSettings:
        """The service's own, for whoever opens catalog and store beside it. Keys come from the environment."""
        os.environ.update(self.weed.environment)
        prefix = "HOLDFAST_"
        return ServiceSettings(**{name.removeprefix(prefix).lower(): value for name, value in self.settings.items()})

    def close(self) -> None:
        self.client.close()
        for way in (*self._ways, self.to_store):
            way.close()
        self.service.stop()

    def _serve(self) -> ServerProcess:
        return ServerProcess(
            ["tests.chaos_run.serve"],
            log=self.folder / "service.log",
            ready=lambda: is_ready(self.url),
            cwd=_REPOSITORY,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")},
                **self.settings,
                **self.weed.environment,
                VARIABLE: str(self.service_clock),
            },
            forked=True,
        )


@contextmanager
def new_place(folder: Path) -> Iterator[Place]:
    with ExitStack() as servers:
        weed = servers.enter_context(seaweedfs_server())
        postgres = servers.enter_context(postgres_server(own=True))
        assert isinstance(postgres, OwnPostgresServer)
        place = Place(folder, postgres, weed)
        servers.callback(place.close)
        yield place


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port
