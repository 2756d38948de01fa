"""One `holdfast serve` for all the SDK's tests, found through the environment as a training job finds it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.serve import ServedHoldfast, holdfast_serve

from holdfast_client.client import Client
from holdfast_protocol.runs import EditProject


@dataclass(frozen=True)
class Service:
    """`chunk_files` is where its store keeps the chunks."""

    served: ServedHoldfast
    store: Path
    client: Client


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedHoldfast, Path]]:
    folder = tmp_path_factory.mktemp("service")
    with holdfast_serve(folder) as running:
        yield running, folder / "data"


@pytest.fixture
def service(served: tuple[ServedHoldfast, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    running, data = served
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "10")
    monkeypatch.setenv("HOLDFAST_SAVE_RETRY_SECONDS", "10")
    monkeypatch.setenv("HOLDFAST_COLLECTIVE_TIMEOUT_SECONDS", "60")
    # Threads of a crowded machine answer late, and no timing decides a result.
    monkeypatch.setenv("HOLDFAST_PREEMPTION_AGREE_SECONDS", "60")
    with Client() as client:
        yield Service(running, data, client)


@pytest.fixture
def run(service: Service) -> str:
    """A run that no other test uses; made here, so that its name is never taken for a mistyped one."""
    name = f"r{uuid.uuid4().hex}"
    service.client.projects.edit("tests", EditProject())
    service.client.runs.create("tests", name)
    return f"tests/{name}"


@pytest.fixture
def own_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service for this test alone, which it may stop, kill or starve."""
    with holdfast_serve(tmp_path) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "3")
        monkeypatch.setenv("HOLDFAST_SAVE_RETRY_SECONDS", "3")
        with Client() as client:
            client.projects.edit("tests", EditProject())
            yield Service(running, tmp_path / "data", client)
