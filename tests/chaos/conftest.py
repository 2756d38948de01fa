"""A service that a test may kill and start again, at the same address with the same data."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from holdfast_client.client import Client
from holdfast_protocol.runs import EditProject
from holdfast_protocol.states import CheckpointState
from tests.support.ports import free_ports
from tests.support.processes import ServerProcess
from tests.support.serve import ENTRY_POINT, without_holdfast_settings

TOKEN = f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"


class RestartableService:
    """`holdfast serve`; the token is given, so that the data folder may be looked at by nobody."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self._folder = folder
        port = free_ports()
        self.url = f"http://127.0.0.1:{port}"
        self._settings = {
            "HOLDFAST_DATA_DIR": str(folder / "data"),
            "HOLDFAST_PORT": str(port),
            "HOLDFAST_BOOTSTRAP_TOKEN": TOKEN,
            **settings,
        }
        self.start()

    def start(self) -> None:
        self.process = ServerProcess(
            [ENTRY_POINT, "serve"],
            log=self._folder / "service.log",
            ready=self._is_ready,
            env=without_holdfast_settings() | self._settings,
            forked=True,
        )

    def kill9(self) -> None:
        self.process.kill9()

    def stop(self) -> None:
        self.process.stop()

    def _is_ready(self) -> bool:
        try:
            return urllib3.request("GET", f"{self.url}/readyz", timeout=2, retries=False).status == 200
        except urllib3.exceptions.HTTPError:
            return False


@pytest.fixture
def service_settings() -> dict[str, str]:
    """Override it to give the service another database or store."""
    return {}


@pytest.fixture
def service(
    tmp_path: Path, service_settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[RestartableService]:
    running = RestartableService(tmp_path, service_settings)
    monkeypatch.setenv("HOLDFAST_URL", running.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)
    # The bytes go through the service, so that killing it cuts an upload in the middle.
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
    monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "60")
    yield running
    running.stop()


@pytest.fixture
def client(service: RestartableService) -> Iterator[Client]:
    with Client() as opened:
        opened.projects.edit("tests", EditProject())
        yield opened


def uploading_steps(client: Client, run: str) -> list[int]:
    return [view.step for view in client.checkpoints.all("tests", run, state=CheckpointState.UPLOADING)]
