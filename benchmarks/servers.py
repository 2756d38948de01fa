"""Fresh servers for each subject, their data on tmpfs, so that neither a disk nor what another subject left decides.

Memory is given back when the block ends: a subject's checkpoints are gone before the next one starts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.support.node_agent import agent_serve
from tests.support.seaweedfs import seaweedfs_server
from tests.support.serve import holdfast_serve
from tests.support.store_servers import StoreServer

Place = Literal["files", "holdfast-posix", "s3", "holdfast-s3"]

_TMPFS = Path(os.environ.get("BENCH_FOLDER", "/dev/shm"))
"""Containers give 64 MiB to /dev/shm, and then the folder must be another one."""


@dataclass(frozen=True)
class Servers:
    folder: Path
    endpoint: str = ""
    bucket: str = ""
    pids: dict[str, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@contextmanager
def servers(place: Place, cores: set[int] | None = None, *, agent: bool = False) -> Iterator[Servers]:
    """`cores`: where the servers may run; wherever this process may where it is None. `agent`: a node agent too, beside
    a service."""
    with _scratch() as folder, _on(cores):
        match place:
            case "files":
                yield Servers(folder)
            case "s3":
                with seaweedfs_server() as s3:
                    yield Servers(folder, s3.endpoint, s3.bucket, _pids(s3), s3.environment)
            case _:
                with holdfast_serve(folder, store="s3" if place == "holdfast-s3" else "posix", forked=False) as service:
                    pids = {"service": service.process.pid} | _pids(service.store)
                    with _agent(folder) if agent else nullcontext({}) as told:
                        yield Servers(folder, pids=pids, environment=service.environment | told)


@contextmanager
def _agent(folder: Path) -> Iterator[dict[str, str]]:
    """What its jobs are told of it."""
    with agent_serve(folder / "agent.log", forked=False) as served:
        yield {"HOLDFAST_AGENT": str(served.socket)}


def _pids(store: StoreServer | None) -> dict[str, int]:
    return {} if store is None else {"seaweedfs": store.pid}


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder on tmpfs; whatever is started meanwhile makes its temporary files there too."""
    before = tempfile.tempdir
    tempfile.tempdir = str(_TMPFS) if _TMPFS.is_dir() else before
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        tempfile.tempdir = before


@contextmanager
def _on(cores: set[int] | None) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
