"""A service and a store behind proxies, and small jobs that save and restore through them."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import torch

import holdfast
from holdfast.layout.plan import ChunkSizes
from holdfast.settings import TrainerSettings
from holdfast_client.chunks import uploader
from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_service.settings import ServiceSettings
from tests.support.fault_proxy import FaultProxy, fault_proxy
from tests.support.seaweedfs import SeaweedFS
from tests.support.service import RunningService, running_service
from tests.support.training import Job, random_numbers, values

SMALL_CHUNKS = ChunkSizes(own_chunk_bytes=1024, cut_bytes=4096, pack_bytes=2048)
BIG_ELEMENTS = 20_000
"""About 20 chunks of 4 KiB; with the model, the index and the layout some 24."""

HELD_BYTES = 32 * 1024
"""So few are hashed and not verified yet that a save offers and reports in several calls, as one of gigabytes does."""

BOUND_SECONDS = 60
"""No call in these tests takes so long, whatever the machine is busy with."""


@dataclass
class Network:
    """`to_service` and `to_store` are the same proxy where the store's URLs lead to the service. `client` goes
    around them."""

    running: RunningService
    to_service: FaultProxy
    to_store: FaultProxy
    token: str
    client: Client

    def settings(self, **changes: Any) -> ClientSettings:
        """Of a client behind the proxies."""
        chosen = {
            "url": self.to_service.url,
            "token": self.token,
            "retry_seconds": 20.0,
            "timeout_seconds": 20.0,
            "direct_files": False,
        }
        return ClientSettings(**(chosen | changes))

    def checkpointer(
        self, run: str, *, strict: bool = False, save_retry_seconds: float = 20.0, **client: Any
    ) -> holdfast.Checkpointer:
        settings = TrainerSettings(
            transfers=4, drain_seconds=30, collective_timeout_seconds=60, save_retry_seconds=save_retry_seconds
        )
        return holdfast.Checkpointer(
            run,
            create=True,
            strict=strict,
            save=holdfast.Every(steps=1),
            chunk_sizes=SMALL_CHUNKS,
            settings=settings,
            client_settings=self.settings(**client),
        )

    def heal(self) -> None:
        for proxy in (self.to_service, self.to_store):
            proxy.accept()
            proxy.heal()

    def struck(self) -> int:
        """How many requests met a fault."""
        return len({id(seen) for proxy in (self.to_service, self.to_store) for seen in proxy.struck()})

    def new_run(self) -> str:
        name = f"r{secrets.token_hex(8)}"
        self.client.runs.create("tests", name)
        return f"tests/{name}"

    def checkpoints(self, run: str) -> list[CheckpointView]:
        """The largest step first."""
        return list(self.client.checkpoints.all(*run.split("/")))

    def assert_restores(self, run: str, expected: dict[str, Any], step: int, at: str | None = None) -> None:
        """Bit for bit, in a new job and with nothing going wrong any more."""
        self.heal()
        state = new_state(seed=99)
        with self.checkpointer(run) as ckpt:
            assert ckpt.restore(state, at) == step + 1
        assert bits(state) == expected


def new_state(seed: int) -> dict[str, Any]:
    """A training job that has made a step, and a tensor of many chunks; chunks of another seed are others."""
    job = Job(seed=seed)
    job.step(0)
    return job.state | {"big": {"t": big_tensor(seed)}}


def big_tensor(seed: int) -> torch.Tensor:
    return torch.randn(BIG_ELEMENTS, generator=torch.Generator().manual_seed(seed))


def bits(state: dict[str, Any]) -> dict[str, Any]:
    """All of it, comparable with ==."""
    return values(state) | {"big": state["big"]["t"].numpy().tobytes()}


def all_bits(state: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """With the random generators of the process: what neither a save nor a failed restore may change."""
    return bits(state), random_numbers()


@contextmanager
def network(seaweedfs: SeaweedFS | None, **service: Any) -> Iterator[Network]:
    """With SeaweedFS behind a proxy of its own, or with a folder that clients reach through the service."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(uploader, "HELD_BYTES", HELD_BYTES))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-network-")))
        store = f"posix://{folder / 'store'}"
        to_store = None
        if seaweedfs is not None:
            for name, value in seaweedfs.environment.items():
                stack.callback(os.environ.pop, name, None)
                os.environ[name] = value
            to_store = stack.enter_context(fault_proxy(_port(seaweedfs.endpoint)))
            store = f"{seaweedfs.store_url_for(f'net-{secrets.token_hex(6)}')}&public_endpoint={to_store.url}"
        settings = ServiceSettings(store=store, data_dir=folder / "data", port=0)
        # model_copy() checks no bounds, so that a ticket may live for two seconds.
        running = stack.enter_context(running_service(settings.model_copy(update=service)))
        to_service = stack.enter_context(fault_proxy(_port(running.url)))
        running.make_project("tests")
        token = running.token()
        around = ClientSettings(url=running.url, token=token, direct_files=False)
        client = stack.enter_context(Client(around))
        yield Network(running, to_service, to_store or to_service, token, client)


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port
