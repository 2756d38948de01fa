"""kill -9 in the middle of a comparison of values: the next process goes on where it was, and the numbers are right."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast_client.client import Client
from holdfast_protocol.comparison.values import ValuesCompared
from holdfast_protocol.runs import EditProject
from holdfast_protocol.states import OperationState
from tests.chaos.conftest import RestartableService

SIZES = holdfast.ChunkSizes(own_chunk_bytes=64 * 1024, pack_bytes=64 * 1024, cut_bytes=128 * 1024)
TENSORS, ELEMENTS = 8, 64 * 1024
WAIT_SECONDS = 120


@pytest.fixture
def service_settings() -> dict[str, str]:
    """Batches of two tensors, and so slow that it can be killed between two of them, however fast the machine is. No
    process that lives is silent for as long as the lease, however slow the machine is."""
    return {
        "HOLDFAST_COMPARISON_MEMORY_BYTES": str(3 * 512 * 1024),
        "HOLDFAST_PROVE_BYTES_PER_SECOND": "120000",
        "HOLDFAST_CONTROLLER_INTERVAL_SECONDS": "0.2",
        "HOLDFAST_LEASE_SECONDS": "15",
    }


def kept_batches(catalog: Path, operation: str) -> int:
    with closing(sqlite3.connect(catalog, timeout=60)) as database:
        [(kept,)] = database.execute("SELECT kept FROM operations WHERE id = ?", (operation,)).fetchall()
    return 0 if kept is None else json.loads(kept)["counts"][0]


def until_kept(catalog: Path, operation: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not kept_batches(catalog, operation):
        assert time.monotonic() < deadline, "no batch was measured"
        time.sleep(0.02)


def test_the_next_process_goes_on_with_the_comparison(service: RestartableService, client: Client, tmp_path: Path):
    client.projects.edit("demo", EditProject())
    saved: list[dict[str, torch.Tensor]] = []
    with holdfast.Checkpointer("demo/gpt", create=True, chunk_sizes=SIZES) as ckpt:
        ckpt.restore({})
        for step in (1, 2):
            generator = torch.Generator().manual_seed(step)
            values = {f"t{number}": torch.randn(ELEMENTS, generator=generator) for number in range(TENSORS)}
            ckpt.save(step, {"model": nn.ParameterDict(values)}).committed.result(timeout=60)
            saved.append(values)
    before, after = (client.checkpoints.select("demo", "gpt", str(step)).id for step in (1, 2))
    started = client.checkpoints.compare_values(before, after)
    catalog = tmp_path / "data" / "catalog.db"
    until_kept(catalog, started.id)
    service.kill9()
    assert 0 < kept_batches(catalog, started.id) < TENSORS // 2, "it was killed in the middle"
    service.start()
    ended = client.operations.wait(started.id, timeout_seconds=WAIT_SECONDS)
    assert (ended.state, ended.tries) == (OperationState.DONE, 2)
    found = ValuesCompared.model_validate(ended.result)
    assert (found.differing, found.equal, found.not_compared) == (TENSORS, 0, [])
    assert found.read_bytes == found.bytes_to_read
    for each in found.tensors:
        one, other = (values[each.name.removeprefix("model/")].double() for values in saved)
        assert each.norm_difference == pytest.approx(float((other - one).norm()), rel=1e-9)
        assert each.cosine == pytest.approx(float(one @ other / one.norm() / other.norm()), rel=1e-9)
