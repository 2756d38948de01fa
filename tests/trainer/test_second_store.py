"""A real job, and a `holdfast serve` of whose two stores the first goes away: the job is resumed from the second."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.support.forked import run_forked
from tests.support.ports import free_ports
from tests.support.processes import ServerProcess
from tests.support.seaweedfs import SeaweedFS, seaweedfs_server
from tests.support.serve import ENTRY_POINT, is_ready, without_holdfast_settings
from tests.support.training import Job, values

import holdfast
from holdfast_client.client import Client
from holdfast_protocol.policies.policy import PolicyKind
from holdfast_protocol.runs import EditProject

_RUN = "tests/gpt"


@dataclass
class TwoStores:
    client: Client
    compress: str
    environment: dict[str, str]
    first_goes_away: Callable[[], None]
    start_again: Callable[[], None]


@pytest.fixture(params=["s3 and posix", "posix and s3"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoStores]:
    """The first store is a bucket and the second a folder, or the other way round."""
    with seaweedfs_server() as s3:
        folder, port = tmp_path / "folder", free_ports()
        bucket_first = request.param == "s3 and posix"
        first, second = (s3.store_url, f"posix://{folder}") if bucket_first else (f"posix://{folder}", s3.store_url)
        settings = {
            "HOLDFAST_DATA_DIR": str(tmp_path / "data"),
            "HOLDFAST_PORT": str(port),
            "HOLDFAST_STORE": first,
            "HOLDFAST_SECOND_STORE": second,
            "HOLDFAST_CONTROLLER_INTERVAL_SECONDS": "0.2",
            "HOLDFAST_STORE_UNAVAILABLE_SECONDS": "0",
            **_keys(s3, bucket_first),
        }
        environment = {"HOLDFAST_URL": f"http://127.0.0.1:{port}", "HOLDFAST_DATA_DIR": str(tmp_path / "data")}
        for name, value in (environment | {"HOLDFAST_RETRY_SECONDS": "30"}).items():
            monkeypatch.setenv(name, value)

        def serve() -> ServerProcess:
            return ServerProcess(
                [ENTRY_POINT, "serve"],
                log=tmp_path / "service.log",
                ready=lambda: is_ready(environment["HOLDFAST_URL"]),
                env=without_holdfast_settings() | settings,
                forked=True,
            )

        running = [serve()]

        def start_again() -> None:
            running.pop().stop()
            running.append(serve())

        try:
            with Client() as client:
                client.projects.edit("tests", EditProject())
                gone = s3.stop if bucket_first else lambda: folder.rename(tmp_path / "not mounted")
                yield TwoStores(
                    client,
                    "zstd" if bucket_first else "none",
                    without_holdfast_settings() | environment,
                    gone,
                    start_again,
                )
        finally:
            running.pop().stop()


def _keys(s3: SeaweedFS, bucket_first: bool) -> dict[str, str]:
    """The second store's keys are its own; the environment's are wrong for it."""
    if bucket_first:
        return s3.environment
    return {
        "AWS_ACCESS_KEY_ID": "another",
        "AWS_SECRET_ACCESS_KEY": "another",
        "HOLDFAST_SECOND_STORE_ACCESS_KEY_ID": s3.access_key,
        "HOLDFAST_SECOND_STORE_SECRET_ACCESS_KEY": s3.secret_key,
    }


def _wait_until_whole(client: Client, step: int) -> None:
    deadline = time.monotonic() + 60
    while (found := client.copies.of_run("tests", "gpt")).copied_step != step or found.lag_seconds:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


@pytest.mark.rule("store-outage-degrades")
def test_a_job_is_resumed_bit_for_bit_from_the_second_store_while_the_first_is_unavailable(
    stores: TwoStores, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    stores.client.policies.put(PolicyKind.COPIES, "tests", None, {})
    stores.client.policies.put(PolicyKind.OBJECTIVES, "tests", None, {"rto_seconds": 3600})
    job = Job()
    with holdfast.Checkpointer(_RUN, create=True, compress=stores.compress) as ckpt:
        ckpt.restore(job.state)
        job.step(0)
        ckpt.save(0, job.state).committed.result(timeout=60)
        saved, weights = copy.deepcopy(values(job.state)), job.state["model"].up.weight.detach().clone()
        _wait_until_whole(stores.client, 0)
        stores.client.controllers.pause("replicate", "step 1 is to be in the first store only")
        job.step(1)
        ckpt.save(1, job.state).committed.result(timeout=60)
    stores.first_goes_away()
    stores.start_again()

    drill = run_forked(ENTRY_POINT, ["drills", "start", _RUN, "--json"], environment=stores.environment)
    assert drill.returncode == 0, drill.stderr
    result = json.loads(drill.stdout)["result"]
    assert (result["step"], result["newest_step"], result["rpo_steps"], result["store"]) == (0, 1, 1, "second")
    assert result["rpo_seconds"] > 0
    assert result["bytes"] > 0
    assert (result["rto_objective_seconds"], result["rpo_objective_seconds"]) == (3600, None)
    assert [(each["step"], each["reason"]) for each in result["skipped"]] == [(1, "unavailable")]
    shown = run_forked(ENTRY_POINT, ["copies", "list", _RUN], environment=stores.environment)
    assert shown.returncode == 0
    assert "tests/gpt" in shown.stdout

    pulled = tmp_path / "pulled"
    pull = run_forked(
        ENTRY_POINT,
        ["checkpoints", "pull", f"{_RUN}@latest", str(pulled), "--only", "model"],
        environment=stores.environment,
    )
    assert pull.returncode == 0, pull.stderr
    assert "read from the second store" in pull.stderr
    model = torch.load(pulled / "model.pt", weights_only=True)
    assert torch.equal(model["up.weight"], weights)

    resumed = Job(seed=5)
    caplog.set_level(logging.INFO)
    with holdfast.Checkpointer(_RUN) as ckpt:
        assert ckpt.restore(resumed.state) == 1
    assert values(resumed.state) == saved
    lines = [record.getMessage() for record in caplog.records]
    assert any("The primary store has not answered" in line for line in lines)
    assert any("resumed tests/gpt from step 0" in line and "from the second store" in line for line in lines)
