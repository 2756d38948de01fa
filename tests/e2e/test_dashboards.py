"""deploy/grafana: each panel's query, asked of a real Prometheus that scrapes a real service with runs on it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from scripts import write_dashboards

from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from tests.support.little_checkpoints import save_little_checkpoint
from tests.support.panels import DASHBOARDS, QUERIES, Query, asked, gpus_of
from tests.support.prometheus import DEPLOYED, Prometheus, deployed_at, exporter, prometheus, promtool
from tests.support.rank import Job, answer
from tests.support.serve import ServedHoldfast, holdfast_serve, run_holdfast

NOT_BEFORE_IT_HAPPENS = {
    "holdfast_calls_waiting",
    "holdfast_call_wait_seconds_bucket",
    "holdfast_certificate_expires_days",
}
"""What is counted by label has no series before the first one, and a service without TLS has no certificate."""
_SHOWN_WITHIN_SECONDS = 300
_SCRAPE_SECONDS = 4
"""A scrape that takes longer fails, as on a busy machine each of one second would."""
_SCRAPED_WITHIN_SECONDS = _SCRAPE_SECONDS + 2
EXPECTED_ALERTS = {"HoldfastRunFailed"}
_SERIES = re.compile(r"\b(holdfast_[a-z0-9_]+)\b(?:\{([^}]*(?:\{[a-z_]+\}[^}]*)*)\})?")

# As node-exporter writes it.
_NODE = """# TYPE node_memory_MemAvailable_bytes gauge
node_memory_MemAvailable_bytes 8e+09
"""


@dataclass(frozen=True)
class Observed:
    service: ServedHoldfast
    metrics: str
    prometheus: Prometheus
    at: float
    """When the run still trained, and each scrape had succeeded: rates of later are of nothing."""


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, prometheus_tools: None) -> Iterator[Observed]:
    """A service with two stores, and Prometheus, which has scraped it while runs saved."""
    folder = tmp_path_factory.mktemp("observed")
    settings = {
        "HOLDFAST_SECOND_STORE": f"posix://{folder / 'second'}",
        "HOLDFAST_CONTROLLER_INTERVAL_SECONDS": "0.2",
        "HOLDFAST_PROJECT_STREAMS": "1",
    }
    with ExitStack() as stack:
        service = stack.enter_context(holdfast_serve(folder, other_settings=settings))
        token = Path(service.environment["HOLDFAST_DATA_DIR"], "token").read_text().strip()
        http = stack.enter_context(
            httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {token}"}, timeout=60)
        )
        made = run_holdfast("tokens", "create", "prometheus", "--scope", "metrics", "--json", **service.environment)
        assert made.returncode == 0, made.stderr
        job = seeded(http)
        dcgm = stack.enter_context(exporter(gpus_of("localhost.corp.example")))
        node = stack.enter_context(exporter(_NODE))
        configuration = deployed_at(
            folder / "prometheus",
            service.url.removeprefix("http://"),
            re.search(r"hold_[0-9a-f]{16}_[0-9a-zA-Z]+", made.stdout)[0],
            {"dcgm": f"localhost:{dcgm}", "node": f"localhost:{node}"},
            scrape_seconds=_SCRAPE_SECONDS,
        )
        server = stack.enter_context(prometheus(configuration, folder))
        at = shown_while_training(server, job)
        yield Observed(service, http.get("/metrics").text, server, at)


def seeded(http: httpx.Client) -> Job:
    """A run on three hosts that trains, one that failed, a drill, and what an operator sees seldom."""
    answer(http.put("/v1/projects/demo", json={"quota_bytes": 10**9}))
    document = {"document": {}}
    answer(http.put("/v1/projects/demo/policies/copies", json=document, headers={"If-Match": "*"}))
    failed = Job(http, "demo/failed", host="other")
    failed.heartbeat(10, first_step=1, steps_run=10, first_step_age_seconds=5.0, progress_age_seconds=0.0)
    failed.save(10)
    failed.end("failed")
    job = Job(http, "demo/gpt", world_size=2, host="localhost", environment={"hosts": "localhost,node-[17-18]"})
    train(job, 1)
    with Client(
        ClientSettings(url=str(http.base_url), token=http.headers["Authorization"].partition(" ")[2])
    ) as client:
        whole = save_little_checkpoint(client, "demo")  # one that a drill can put together
    drilled(http, f"/v1/projects/{whole.project}/runs/{whole.run}/drills")
    answer(http.post("/v1/controllers/tiers/pause", json={"reason": "tried"}))
    with http.stream("GET", "/v1/events/stream"):
        assert http.get("/v1/events/stream").status_code == 429, "a call that is refused"
    return job


def drilled(http: httpx.Client, drills: str) -> None:
    """Until one succeeds: what it reads is copied meanwhile."""
    deadline = time.monotonic() + _SHOWN_WITHIN_SECONDS
    seen: dict[str, Any] = {"state": "failed"}
    while seen["state"] != "done":
        assert time.monotonic() < deadline, seen
        if seen["state"] == "failed":
            seen = answer(http.post(drills, json={"store": "second"}))
        seen = answer(http.get(f"/v1/operations/{seen['id']}", params={"wait": 5}))


def train(job: Job, step: int) -> None:
    job.heartbeat(
        step,
        first_step=1,
        steps_run=step,
        first_step_age_seconds=float(step),
        progress_age_seconds=0.0,
        steps_per_second=2.0,
    )
    job.save(step)


CHOSEN = {"project": "demo", "run": "gpt"}
HOSTS_JOINED = "holdfast:run_host * on (host) group_left () (DCGM_FI_DEV_XID_ERRORS + 1)"


def shown_while_training(server: Prometheus, job: Job) -> float:
    """Trains on until each panel shows something: rates, and numbers that the service remembers for half a minute, take
    their time. Returns a moment at which all of them do, and nothing of a scrape that took too long is seen."""
    deadline = time.monotonic() + _SHOWN_WITHIN_SECONDS
    texts = [HOSTS_JOINED, *(asked(each.text, chosen) for each in QUERIES for chosen in ({}, CHOSEN))]
    step = 1
    while True:
        step += 1
        train(job, step)
        time.sleep(1)
        # A scrape that fails takes its series away at the time when it began: those of this moment have ended.
        at = time.time() - _SCRAPED_WITHIN_SECONDS
        is_settled = alerting(server, at) == EXPECTED_ALERTS and all(server.query(text, at) for text in texts)
        if is_settled or time.monotonic() > deadline:
            return at


def alerting(server: Prometheus, at: float) -> set[str]:
    """Those too that do not last long enough yet."""
    return {each["metric"]["alertname"] for each in server.query("ALERTS", at)}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_file_is_what_its_definition_says(name: str) -> None:
    file = write_dashboards.FOLDER / f"{name}.json"
    assert file.read_text(encoding="utf-8") == write_dashboards.written(DASHBOARDS[name]), "run `make docs`"
    assert {path.stem for path in file.parent.glob("*.json")} == DASHBOARDS.keys()


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_each_panel_shows_something(observed: Observed, query: Query) -> None:
    found = observed.prometheus.query(asked(query.text), observed.at)
    assert found, f"{query}: {query.text} shows nothing"
    one = observed.prometheus.query(asked(query.text, CHOSEN), observed.at)
    assert one, f"{query}: {query.text} shows nothing of {CHOSEN}"
    for label, value in CHOSEN.items():
        if f"${label}" in query.text:
            assert {each["metric"].get(label, value) for each in one} == {value}
    assert set(re.findall(r"{{(\w+)}}", query.legend)) <= found[0]["metric"].keys()


def test_rules_and_panels_name_only_series_and_labels_that_there_are(observed: Observed) -> None:
    there: dict[str, set[str]] = {}
    for each in observed.prometheus.ask("series", **{"match[]": '{__name__=~"holdfast_.*"}'}):
        there.setdefault(each["__name__"], set()).update(each)
    rules = yaml.safe_load((DEPLOYED / "rules.yml").read_text())["groups"]
    queries = [rule["expr"] for group in rules for rule in group["rules"]]
    queries += [each.text for each in QUERIES]
    queries += [
        f'{series}{{{label}=""}}' for each in DASHBOARDS.values() for label, series in each["variables"].items()
    ]
    checked = set()
    for query in queries:
        for series, labels in _SERIES.findall(query):
            checked.add(series)
            if series in NOT_BEFORE_IT_HAPPENS:
                continue
            assert series in there, f"{series} is not in /metrics: {query}"
            named = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", labels))
            assert named <= there[series], f"{series} has no label {named - there[series]}: {query}"
    assert len(checked) > 30


def test_promtool_finds_nothing_wrong_with_the_metrics(observed: Observed) -> None:
    done = promtool("check", "metrics", text=observed.metrics)
    assert not complaints(done.stdout), done.stdout


def complaints(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("holdfast_")]


def test_hosts_join_whatever_way_they_write_their_name(observed: Observed) -> None:
    up = observed.prometheus.query('up{job="node"}', observed.at)
    assert [each["metric"]["host"] for each in up] == ["localhost"]
    found = observed.prometheus.query(HOSTS_JOINED, observed.at)
    assert [each["metric"]["host"] for each in found] == ["localhost"]


def test_the_rules_are_evaluated_and_only_the_failed_run_alerts(observed: Observed) -> None:
    groups: list[dict[str, Any]] = observed.prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert not {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")}
    assert alerting(observed.prometheus, observed.at) == EXPECTED_ALERTS
