"""One `holdfast serve` for all the SDK's tests, found through the environment as a training job finds it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.serve import ServedHoldfast, holdfast_serve

from holdfast_client.client import Client
from holdfast_protocol.runs import EditProject, ProjectView


@dataclass(frozen=True)
class Service:
    """A service, and the project that a test has in it."""

    served: ServedHoldfast
    data: Path
    client: Client
    project: ProjectView

    @property
    def store(self) -> Path:
        """The folder of the store that has the chunks of the project."""
        return self.data / "store" / self.project.id


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedHoldfast, Path]]:
    folder = tmp_path_factory.mktemp("service")
    with holdfast_serve(folder) as running:
        yield running, folder / "data"


@pytest.fixture
def service(served: tuple[ServedHoldfast, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """The one of all tests, with a project that no other test uses.

    Chunks are shared within a project: while a chunk that one test has damaged waits for its repair, the service reads
    each good copy of it. In a common project it so finds what another test has damaged before that test's restore does.
    """
    running, data = served
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "10")
    monkeypatch.setenv("HOLDFAST_SAVE_RETRY_SECONDS", "10")
    monkeypatch.setenv("HOLDFAST_COLLECTIVE_TIMEOUT_SECONDS", "60")
    # Threads of a crowded machine answer late, and no timing decides a result.
    monkeypatch.setenv("HOLDFAST_PREEMPTION_AGREE_SECONDS", "60")
    monkeypatch.setenv("HOLDFAST_PREEMPTION_GRACE_SECONDS", "180")
    with Client() as client:
        yield Service(running, data, client, client.projects.edit(f"p{uuid.uuid4().hex}", EditProject()))


@pytest.fixture
def run(service: Service) -> str:
    """A run that is made already, so that its name is never taken for a mistyped one."""
    service.client.runs.create(service.project.name, "run")
    return f"{service.project.name}/run"


@pytest.fixture
def own_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service for this test alone, which it may stop, kill or starve."""
    with holdfast_serve(tmp_path) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "3")
        monkeypatch.setenv("HOLDFAST_SAVE_RETRY_SECONDS", "3")
        with Client() as client:
            yield Service(running, tmp_path / "data", client, client.projects.edit("tests", EditProject()))
