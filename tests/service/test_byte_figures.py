"""Logical, stored and deduplicated bytes of checkpoints, runs and projects: three figures, counted from the rows."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update

from holdfast_service.db import cached_read
from holdfast_service.db.tables.core import Checkpoint, Copy
from tests.support.rank import Job, answer
from tests.support.service import RunningService

CONTENT = b"x" * 1000
SAVED = 1000 + 1006  # of Job.save: the state, and its index


def figures(service: RunningService, of: str) -> tuple[int, int, int]:
    """Logical, stored and deduplicated bytes of `demo` or `demo/gpt`."""
    project, _, run = of.partition("/")
    view = answer(service.http().get(f"/v1/projects/{project}" + (f"/runs/{run}" if run else "")))
    return view["logical_bytes"], view["stored_bytes"], view["deduplicated_bytes"]


def sealed_by(view: dict[str, Any]) -> tuple[int, int]:
    return view["uploaded_bytes"], view["deduplicated_bytes"]


def test_what_is_there_is_sent_once_across_steps_and_runs(service: RunningService) -> None:
    job = Job(service.http())
    assert sealed_by(job.save(100, content=CONTENT)) == (SAVED, 0)
    assert sealed_by(job.save(200, content=CONTENT)) == (0, SAVED)
    assert figures(service, "demo/gpt") == figures(service, "demo") == (2 * SAVED, SAVED, SAVED)
    Job(service.http(), "demo/fine-tuned").save(10, content=CONTENT)
    assert figures(service, "demo/fine-tuned") == (SAVED, SAVED, SAVED)
    assert figures(service, "demo/gpt") == (2 * SAVED, SAVED, SAVED)
    assert figures(service, "demo") == (3 * SAVED, SAVED, 2 * SAVED)


def test_what_is_there_is_sent_once_across_ranks_and_within_one(service: RunningService) -> None:
    save = Job(service.http(), world_size=2).begin(100)
    save.write(0, [b"frozen", b"tied", b"tied", b"index"])
    view = save.write(1, [b"frozen", b"index of 1"])
    assert sealed_by(view) == (len(b"frozentiedindexindex of 1"), len(b"tiedfrozen"))


def test_what_is_stored_smaller_was_sent_all_the_same(service: RunningService) -> None:
    save = Job(service.http()).begin(100)
    save.upload(0, [b"a well compressed state", b"index"])
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.stored_bytes > 5).values(stored_bytes=3))
    assert sealed_by(save.seal(0, [b"a well compressed state", b"index"])) == (8, 0)
    assert figures(service, "demo/gpt") == (28, 8, 0)


def test_only_what_is_committed_now_is_logical_and_deduplicated(service: RunningService) -> None:
    job = Job(service.http())
    job.save(100, content=CONTENT)
    gone = job.save(200, content=CONTENT)
    job.begin(300).upload(0, [CONTENT])
    pending = job.begin(400)
    pending.negotiate(0, [b"under way"])
    with service.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.id == gone["id"]).values(state="trashed"))
    assert figures(service, "demo/gpt") == (SAVED, SAVED, 0)
    assert figures(service, "demo") == (SAVED, SAVED + len(b"under way"), 0)


def test_a_list_of_runs_does_not_add_up_what_each_takes(service: RunningService) -> None:
    Job(service.http()).save(100, content=CONTENT)
    (run,) = answer(service.http().get("/v1/projects/demo/runs"))["items"]
    assert (run["logical_bytes"], run["deduplicated_bytes"], run["stored_bytes"]) == (SAVED, 0, None)


def test_an_empty_project_has_nothing(service: RunningService) -> None:
    service.make_project("empty")
    answer(service.http().put("/v1/projects/empty/runs/none"))
    assert figures(service, "empty") == figures(service, "empty/none") == (0, 0, 0)


def test_prometheus_is_told_the_three_apart(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_read, "LONGEST_SECONDS", 0.0)
    job = Job(service.http())
    for step in (100, 200, 300):
        job.save(step, content=CONTENT)
    seen = {
        sample.name: sample.value
        for family in text_string_to_metric_families(service.http().get("/metrics").text)
        for sample in family.samples
        if sample.labels == {"project": "demo"}
    }
    told = [seen[f"holdfast_{name}_bytes"] for name in ("logical", "stored", "deduplicated")]
    assert told == [3 * SAVED, SAVED, 2 * SAVED]
