"""A real job, and a `holdfast serve` whose database is lost: it comes back from the bucket, and the job goes on."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.ports import free_ports
from tests.support.processes import ServerProcess
from tests.support.seaweedfs import seaweedfs_server
from tests.support.serve import ENTRY_POINT, HOLDFAST, is_ready, without_holdfast_settings
from tests.support.training import Job, values

import holdfast
from holdfast_client.client import Client
from holdfast_protocol.runs import EditProject

_RUN = "tests/gpt"


@dataclass
class Served:
    """`environment` has the settings of the service and of its clients; one process of it runs at a time."""

    environment: dict[str, str]
    folder: Path
    compress: str
    store: str

    def start(self) -> ServerProcess:
        url = self.environment["HOLDFAST_URL"]
        return ServerProcess(
            [ENTRY_POINT, "serve"],
            log=self.folder / "service.log",
            ready=lambda: is_ready(url),
            env=without_holdfast_settings()
            | {name: value for name, value in self.environment.items() if name != "HOLDFAST_URL"},
            forked=True,
        )

    def run(self, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [HOLDFAST, *command],
            env=without_holdfast_settings() | self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done


@pytest.fixture(params=["posix", "s3"])
def served(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    port = free_ports()
    environment = {
        "HOLDFAST_URL": f"http://127.0.0.1:{port}",
        "HOLDFAST_PORT": str(port),
        "HOLDFAST_DATA_DIR": str(tmp_path / "data"),
        "HOLDFAST_CONTROLLER_INTERVAL_SECONDS": "0.2",
    }
    for name in ("HOLDFAST_URL", "HOLDFAST_DATA_DIR"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "30")
    if request.param == "posix":
        yield Served(environment, tmp_path, "none", f"posix://{tmp_path / 'data' / 'store'}")
        return
    with seaweedfs_server() as s3:
        environment |= {"HOLDFAST_STORE": s3.store_url, **s3.environment}
        yield Served(environment, tmp_path, "zstd", s3.store_url)


def _wait_until_recorded() -> None:
    deadline = time.monotonic() + 60
    with Client() as client:
        while client.controllers.get("records").due:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.rule("record-outbox")
def test_a_job_is_resumed_bit_for_bit_after_the_database_was_lost(served: Served) -> None:
    service = served.start()
    with Client() as client:
        client.projects.edit("tests", EditProject())
    job = Job()
    with holdfast.Checkpointer(_RUN, create=True, compress=served.compress) as ckpt:
        ckpt.restore(job.state)
        for step in range(2):
            job.step(step)
            ckpt.save(step, job.state).committed.result(timeout=60)
        saved = copy.deepcopy(values(job.state))
    _wait_until_recorded()
    service.stop()
    for path in (served.folder / "data").glob("catalog.db*"):
        path.unlink()

    shown = json.loads(served.run("catalog", "rebuild", "--from", served.store, "--dry-run", "--json").stdout)
    assert (shown["whole"], shown["checkpoints"], shown["orphans"]) == (True, {"committed": 2}, 0)
    assert not list((served.folder / "data").glob("catalog.db*")), "a dry run writes nothing"
    told = served.run("catalog", "rebuild", "--from", served.store).stdout
    assert "holdfast stores claim" in told

    service = served.start()
    try:
        resumed = Job(seed=5)
        with holdfast.Checkpointer(_RUN) as ckpt:
            assert ckpt.restore(resumed.state) == 2
            assert values(resumed.state) == saved
            resumed.step(2)
            ckpt.save(2, resumed.state).committed.result(timeout=60)
        assert json.loads(served.run("stores", "list", "--json").stdout)[0]["claimed"] is False
        # The job has saved into a store that is not adopted: only this database knows that, and adopting fixes it.
        (checked,) = json.loads(served.run("catalog", "check", "--json", code=1).stdout)["result"]["stores"]
        told = {(each["kind"], each["blocks"]) for each in checked["findings"]}
        assert told == {("unrecorded", False), ("outdated_records", False)}
        assert json.loads(served.run("stores", "claim", "--json").stdout)[0]["claimed"] is True
        _wait_until_recorded()
        served.run("catalog", "check", "--deep", "--json")
    finally:
        service.stop()


@pytest.mark.rule("rebuild-doubts")
@pytest.mark.parametrize("served", ["posix"], indirect=True)
def test_a_run_whose_records_are_lost_does_not_begin_from_nothing_before_a_person_confirms_it(served: Served) -> None:
    service = served.start()
    with Client() as client:
        client.projects.edit("tests", EditProject())
    job = Job()
    for run in (_RUN, "tests/seen"):
        with holdfast.Checkpointer(run, create=True) as ckpt:
            ckpt.restore(job.state)
            ckpt.save(0, job.state).committed.result(timeout=60)
    _wait_until_recorded()
    with Client() as client:
        lost = client.attempts.list("tests", "gpt").items[0]
        (checkpoint,) = client.checkpoints.all("tests", "gpt")
    assert lost.number == 1
    service.stop()
    for path in (served.folder / "data").glob("catalog.db*"):
        path.unlink()
    for name in ("checkpoints", "runs"):
        for folder in (served.folder / "data" / "store").glob(f"records/*/{name}/*"):
            if name == "runs" or folder.name == checkpoint.id:
                shutil.rmtree(folder)

    told = served.run("catalog", "rebuild", "--from", served.store).stdout
    assert "holdfast catalog confirm" in told
    service = served.start()
    try:
        state = Job(seed=5).state
        with pytest.raises(holdfast.errors.CommitsUnknown, match="holdfast catalog confirm tests/gpt"):
            with holdfast.Checkpointer(_RUN, create=True) as ckpt:
                ckpt.restore(state)
        with holdfast.Checkpointer("tests/seen") as ckpt:
            assert ckpt.restore(state) == 1, "what has a checkpoint goes on from it"
        assert "objects in its stores belong to no checkpoint" in served.run("catalog", "doubts").stdout
        served.run("catalog", "confirm", _RUN, "--reason", "its first run was a test")
        assert "tests: " in served.run("catalog", "doubts").stdout, "the project is still in doubt"
        with holdfast.Checkpointer(_RUN, create=True) as ckpt:
            assert ckpt.restore(Job(seed=6).state) == 0
        served.run("catalog", "confirm", "tests")
        assert "Nothing is in doubt" in served.run("catalog", "doubts").stdout
    finally:
        service.stop()
