"""A service as a process of its own for each file of tests, and a client whose settings are the environment's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from holdfast_client import Client
from holdfast_protocol.base import RunName
from holdfast_protocol.runs import EditProject
from tests.support.serve import ServedHoldfast, holdfast_serve


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHoldfast]:
    with holdfast_serve(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def client(served: ServedHoldfast, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)
    with Client() as connected:
        connected.projects.edit("tests", EditProject())
        yield connected


@pytest.fixture
def run(client: Client) -> RunName:
    name = f"r{uuid.uuid4().hex}"
    client.runs.create("tests", name)
    return RunName("tests", name)
