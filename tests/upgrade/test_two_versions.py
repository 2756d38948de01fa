"""The last released version beside this one, on one catalog: services, workers and trainers of either, in the order of
a fleet's upgrade (docs/operating/upgrade.md).

`released.txt` names the commit of the release. Its packages are taken from the repository's own history and run in the
same virtual environment.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine, text

from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION
from tests.support.ports import free_ports
from tests.support.postgres import PostgresServer
from tests.support.processes import ServerProcess
from tests.support.rank import Job, Refused, answer
from tests.support.serve import is_ready, without_holdfast_settings
from tests.support.warm_python import WarmPython

REPOSITORY = Path(__file__).parents[2]
RELEASED = (Path(__file__).parent / "released.txt").read_text().strip()
PACKAGES = ("client", "service", "trainer_sdk")
TRAINER = """
import sys, torch, holdfast
assert holdfast.__file__.startswith(sys.argv[3]), holdfast.__file__
weight = torch.zeros(8)
state = {"weight": weight}
with holdfast.Checkpointer(sys.argv[2], save=holdfast.Every(steps=1)) as ckpt:
    began = ckpt.restore(state)
    for step in range(began, int(sys.argv[1])):
        weight.add_(1)
        ckpt.step(step, state, metrics={"loss": 1.0})
        ckpt.wait()
print(f"began {began} added {weight.mean().item():g}")
"""


@dataclass(frozen=True)
class Version:
    """`path`: what an interpreter imports from, in front of the virtual environment's own packages. `warm`: one that
    has imported torch and this version's SDK, for the many launches of a trainer."""

    name: str
    path: str
    root: Path
    trainer: Path
    warm: WarmPython

    def environment(self, settings: dict[str, str]) -> dict[str, str]:
        return without_holdfast_settings() | settings | {"PYTHONPATH": self.path}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", "from holdfast_client.cli.main import main; main()", *arguments]

    def run(self, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment(settings), capture_output=True, text=True, timeout=240, check=False
        )


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Version]:
    folder = tmp_path_factory.mktemp("released")
    taken = subprocess.run(
        ["git", "archive", RELEASED, *PACKAGES, "migrations", "pyproject.toml"], cwd=REPOSITORY, capture_output=True
    )
    if taken.returncode:
        asked = ["git", "rev-parse", "--is-shallow-repository"]
        shallow = subprocess.run(asked, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip() == "true"
        # A shallow clone has no released commit to take; in a whole one the file names a commit that never was.
        (pytest.skip if shallow else pytest.fail)(
            f"The released commit {RELEASED} of tests/upgrade/released.txt is not in this clone. A shallow clone lacks "
            f"it: `git fetch --unshallow`, or `git fetch origin {RELEASED}`.\n{taken.stderr.decode()}"
        )
    with tarfile.open(fileobj=io.BytesIO(taken.stdout)) as archive:
        archive.extractall(folder, filter="data")
    with version_in(folder, folder / "packages", "released") as released:
        yield released


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Version]:
    with version_in(REPOSITORY, tmp_path_factory.mktemp("packages"), "this") as this:
        yield this


@contextmanager
def version_in(root: Path, packages: Path, name: str) -> Iterator[Version]:
    """The commands of an installation are in its metadata: those of this tree, and not those of the environment."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    told = packages / f"holdfast-{project['version']}.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: holdfast\nVersion: {project['version']}\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{point} = {value}" for point, value in points.items()))
    ]
    (told / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (packages / "trainer.py").write_text(TRAINER)
    path = os.pathsep.join(map(str, (packages, *(root / each for each in PACKAGES))))
    with WarmPython(packages, os.pathsep.join((path, str(REPOSITORY)))) as warm:
        yield Version(name, path, root, packages / "trainer.py", warm)


@dataclass
class Fleet:
    """One catalog and one store. `start` gives a service's URL."""

    settings: dict[str, str]
    folder: Path
    stack: ExitStack
    token: str

    def serve(self, version: Version, **settings: str) -> tuple[str, ServerProcess]:
        port = free_ports()
        url = f"http://127.0.0.1:{port}"
        process = self._process(
            version, ["serve"], f"{version.name}-{port}", lambda: is_ready(url), HOLDFAST_PORT=str(port), **settings
        )
        return url, process

    def work(self, version: Version) -> ServerProcess:
        log = self.folder / f"{version.name}-worker.log"
        return self._process(
            version, ["workers", "run"], f"{version.name}-worker", lambda: "works as" in log.read_text()
        )

    def _process(
        self, version: Version, command: list[str], name: str, ready: Callable[[], bool], **settings: str
    ) -> ServerProcess:
        process = ServerProcess(
            version.command(*command),
            log=self.folder / f"{name}.log",
            ready=ready,
            env=version.environment(self.settings | settings),
        )
        self.stack.callback(process.stop)
        return process

    def http(self, url: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token}", PROTOCOL_HEADER: PROTOCOL_VERSION}
        return self.stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60))

    def train(self, version: Version, url: str, steps: int, run: str = "demo/two-versions") -> int:
        """The step that the trainer began with; what it ends with is always what so many steps give."""
        ran = self.launch(version, url, steps, run)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        told = re.search(r"began (\d+) added (\d+)", ran.stdout)
        assert told is not None, ran.stdout
        assert int(told[2]) == steps
        return int(told[1])

    def launch(self, version: Version, url: str, steps: int, run: str) -> subprocess.CompletedProcess[str]:
        command = version.warm.command(version.trainer, str(steps), run, str(version.root))
        return version.run(*command, HOLDFAST_URL=url, HOLDFAST_TOKEN=self.token)


@pytest.fixture
def fleet(postgres: PostgresServer, tmp_path: Path) -> Iterator[Fleet]:
    name = f"two_versions_{secrets.token_hex(6)}"
    token = f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"
    settings = {
        "HOLDFAST_DATABASE_URL": postgres.create_database(name),
        "HOLDFAST_STORE": f"posix://{tmp_path / 'store'}",
        "HOLDFAST_DATA_DIR": str(tmp_path / "data"),
        "HOLDFAST_BOOTSTRAP_TOKEN": token,
    }
    with ExitStack() as stack:
        stack.callback(postgres.drop_database, name)
        yield Fleet(settings, tmp_path, stack, token)


@pytest.mark.timeout(1200)
def test_a_fleet_is_upgraded_while_jobs_of_both_versions_save(fleet: Fleet, old: Version, new: Version) -> None:
    url, old_service = fleet.serve(old, HOLDFAST_SERVE_CONTROLLERS="false")
    assert fleet.train(old, url, 3) == 0

    # The migration, with a job that saves through the old service.
    job = Job(fleet.http(url), "demo/through", create=True)
    with ThreadPoolExecutor(1) as operator:
        migrating = operator.submit(new.run, *new.command("admin", "migrate"), **fleet.settings)
        step = 0
        while not migrating.done() or step < 3:
            step += 1
            assert save(job, step)["state"] == "committed"
    assert migrating.result().returncode == 0, migrating.result().stderr
    assert save(job, step + 1)["state"] == "committed"

    # The old service with a new worker: it records what the old service commits.
    worker = fleet.work(new)
    saved = save(job, step + 2)
    wait_for(lambda: saved["id"] in recorded(fleet), "the new worker records the old service's commit")
    assert fleet.train(old, url, 6) == 3
    assert fleet.train(new, url, 9) == 6, "a new trainer with the old service"

    # Both services on one catalog, then the new one alone.
    new_url, _ = fleet.serve(new, HOLDFAST_SERVE_CONTROLLERS="false", HOLDFAST_MIGRATE_AT_START="false")
    assert fleet.train(old, new_url, 12) == 9, "an old trainer with the new service"
    assert fleet.train(new, url, 15) == 12, "what the new service has committed goes on through the old one"
    job.http = fleet.http(new_url)
    assert save(job, step + 3)["state"] == "committed", "one attempt, through both"
    old_service.stop()
    assert fleet.train(new, new_url, 18) == 15
    assert worker.runs
    found = answer(fleet.http(new_url).get("/v1/projects/demo/runs/two-versions/restore-point"))
    assert found["restore_point"]["step"] == 17


@pytest.mark.timeout(1200)
def test_the_old_service_starts_again_on_the_migrated_catalog_if_that_says_so(
    fleet: Fleet, old: Version, new: Version
) -> None:
    """A way back without a restore. A release from before catalogs said what works with them is refused by name."""
    assert old.run(*old.command("admin", "create-token"), **fleet.settings).returncode == 0
    assert new.run(*new.command("admin", "migrate"), **fleet.settings).returncode == 0
    with create_engine(fleet.settings["HOLDFAST_DATABASE_URL"]).connect() as connection:
        works_from = connection.execute(text("SELECT works_from FROM catalog_identity")).scalar()
        newest = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    listed = ["git", "ls-tree", "--name-only", RELEASED, "migrations/versions/"]
    names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    known = {Path(name).name.partition("_")[0] for name in names}
    again = old.run(*old.command("admin", "create-token"), **fleet.settings)
    if newest in known or works_from in known:
        assert again.returncode == 0, again.stderr
    else:
        assert again.returncode == 2
        assert f"revision {newest}, which this version of Holdfast does not know" in again.stderr


@pytest.mark.timeout(1200)
def test_a_fork_begins_no_job_that_cannot_read_it_and_waits_for_one_that_can(
    fleet: Fleet, old: Version, new: Version
) -> None:
    """Through an old service no trainer can: it hands out the manifest without the name of the run that was forked.
    Once the release knows forks, this test has told all that it can."""
    old_url, _ = fleet.serve(old, HOLDFAST_SERVE_CONTROLLERS="false")
    migrated = new.run(*new.command("admin", "migrate"), **fleet.settings)
    assert migrated.returncode == 0, migrated.stderr
    url, _ = fleet.serve(new)
    assert fleet.train(new, url, 3) == 0
    http = fleet.http(url)
    forks = "/v1/projects/demo/runs/two-versions/forks"
    # The service first reads what was written into its mount.
    wait_for(lambda: http.post(forks, json={"name": "fork"}).status_code == 201, "the fork is made")
    point = answer(http.get("/v1/projects/demo/runs/fork/restore-point"))["restore_point"]
    for version, through, told in (
        (old, old_url, "what rank 0 sealed is rank 0 of step 2 of demo/two-versions"),
        (new, old_url, "what rank 0 sealed is rank 0 of step 2 of demo/two-versions"),
        (old, url, f"protocol 1.9 does not know and this service's {PROTOCOL_VERSION} does"),
    ):
        ran = fleet.launch(version, through, 5, "demo/fork")
        assert ran.returncode != 0, ran.stdout
        assert told in ran.stderr
        assert "began" not in ran.stdout, "from nothing"
    found = answer(http.get("/v1/projects/demo/runs/fork/restore-point"))["restore_point"]
    assert found == point, "it is neither damaged nor in quarantine for that"
    assert fleet.train(new, url, 5, "demo/fork") == 3
    assert fleet.train(old, old_url, 7, "demo/fork") == 5, "what its own job has saved, all can read"


def save(job: Job, step: int) -> dict[str, Any]:
    """As a client does: what says that it may be tried again is tried again. A save whose transaction and the migration
    wait for each other can be told so, though nearly always the migration gives up."""
    while True:
        try:
            return job.save(step)
        except Refused as error:
            if error.status != 503:
                raise


def recorded(fleet: Fleet) -> str:
    """The names of the records beside the data."""
    store = Path(fleet.settings["HOLDFAST_STORE"].removeprefix("posix://"))
    return " ".join(str(path) for path in store.rglob("*"))


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, what
        time.sleep(0.1)
