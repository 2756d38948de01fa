"""`holdfast serve --workers N`, and kill -9 at one process of it after the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.databases import PostgresCatalogs
from tests.support.postgres import postgres_server
from tests.support.rank import Job
from tests.support.several_processes import ServedBySeveral, served_by_several


@pytest.fixture
def served(postgres_catalogs: PostgresCatalogs, tmp_path: Path) -> Iterator[ServedBySeveral]:
    url = postgres_catalogs.new()
    with served_by_several(tmp_path, url) as started:
        yield started
    postgres_catalogs.give_back(url)


def test_what_is_killed_is_started_again_and_a_job_sees_nothing_of_it(served: ServedBySeveral) -> None:
    for kind in ("serve", "worker"):
        victim = min(served.alive(kind))
        os.kill(victim, signal.SIGKILL)
        with served.http() as http:
            job = Job(http, f"demo/{kind}", create=True, world_size=2)
            assert job.save(1)["state"] == "committed"
        served.until(lambda killed=victim: not psutil.pid_exists(killed))  # type: ignore[misc]
        served.until_complete()
        if kind == "serve":
            # Nothing of what it last said of the calls that wait there is told any more.
            counters = Path(psutil.Process(min(served.alive(kind))).environ()["PROMETHEUS_MULTIPROC_DIR"])
            served.until(lambda gone=victim: not list(counters.glob(f"gauge_live*_{gone}.db")))  # type: ignore[misc]
    served.service.process.stop()
    assert "Traceback" not in served.service.process.log_text
    assert not served.alive("serve") | served.alive("worker")


def test_a_supervisor_that_is_killed_leaves_nobody_on_its_port(served: ServedBySeveral) -> None:
    left = [psutil.Process(pid) for pid in served.alive("serve") | served.alive("worker")]
    os.kill(served.service.process.pid, signal.SIGKILL)
    psutil.wait_procs(left)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.service.url}/healthz")


def test_what_is_killed_while_the_database_is_unavailable_comes_back_with_it(tmp_path: Path) -> None:
    with postgres_server(own=True) as own, served_by_several(tmp_path, own.create_database("holdfast")) as served:
        victims = {min(served.alive("serve")), *served.alive("worker")}
        own.kill9()
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        served.until(lambda: served.service.process.log_text.count("process_cannot_start") >= len(victims))
        own.restart()
        served.until_complete()
        with served.http() as http:
            assert Job(http, create=True).save(1)["state"] == "committed"
