"""`holdfast serve --workers N` as real processes: one port, several processes, and one for the background work."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast_service.serve import answer_evenly
from tests.support.databases import PostgresCatalogs
from tests.support.rank import Job
from tests.support.serve import request_without_its_body, run_holdfast
from tests.support.several_processes import ServedBySeveral, served_by_several

OPENED = "POST /v1/projects/{project}/runs/{run}/attempts"


@pytest.fixture
def served(postgres_catalogs: PostgresCatalogs, tmp_path: Path) -> Iterator[ServedBySeveral]:
    url = postgres_catalogs.new()
    with served_by_several(tmp_path, url) as started:
        yield started
    postgres_catalogs.give_back(url)


def test_they_serve_one_port_count_together_and_end_together(served: ServedBySeveral) -> None:
    processes = [psutil.Process(pid) for pid in served.alive("serve") | served.alive("worker")]
    nice = psutil.Process().nice()
    assert {psutil.Process(pid).nice() for pid in served.alive("serve")} == {nice}
    assert {psutil.Process(pid).nice() for pid in served.alive("worker")} == {min(19, nice + 5)}, "calls come first"
    with served.http() as http:
        for number in range(10):
            Job(http, f"demo/gpt-{number}", create=True)
        # Each tells what all have counted. A process counts a request when its reply is already on the way.
        served.until(lambda: _requests(http.get("/metrics").raise_for_status().text)[OPENED] == 10)
    with request_without_its_body(served.service.url, served.token) as (connection, body):
        os.kill(served.service.process.pid, signal.SIGTERM)
        served.until(lambda: "Shutting down" in served.service.process.log_text)
        connection.sendall(body)
        assert b"201 Created" in connection.recv(4096)
    served.service.process.wait(60)
    assert "Traceback" not in served.service.process.log_text
    assert not any(each.is_running() for each in processes)


def test_a_process_that_answers_looks_at_nothing_again_that_it_has_loaded() -> None:
    switch, thresholds = sys.getswitchinterval(), gc.get_threshold()
    try:
        answer_evenly()
        assert sys.getswitchinterval() == pytest.approx(0.001)
        assert gc.get_objects(generation=2) == []
    finally:
        sys.setswitchinterval(switch)
        gc.set_threshold(*thresholds)


def _requests(metrics: str) -> Counter[str]:
    counted: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "holdfast_requests_total":
                counted[f"{sample.labels['method']} {sample.labels['route']}"] += int(sample.value)
    return counted


def test_sqlite_has_one_process_and_the_refusal_says_what_to_do(tmp_path: Path) -> None:
    refused = run_holdfast("serve", "--workers", "2", HOLDFAST_DATA_DIR=str(tmp_path / "data"), HOLDFAST_PORT="0")
    assert refused.returncode == 2
    assert "name a Postgres to share the work" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "data").exists()
