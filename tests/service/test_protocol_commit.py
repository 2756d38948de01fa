"""Begin, seal, commit: protocol rules 6 to 10, over HTTP on both databases."""

from __future__ import annotations

import pytest

from tests.support.rank import Job, Refused, digest_of
from tests.support.service import RunningService


@pytest.fixture
def job(service: RunningService) -> Job:
    return Job(service.http(), world_size=2)


def test_the_seal_that_completes_the_world_commits(job: Job) -> None:
    save = job.begin(100)
    first = save.write(0, [b"layout", b"weights of 0", b"index of 0"], metrics={"loss": {"value": 1.5}})
    assert (first["state"], first["sealed_ranks"], first["missing_ranks"]) == ("uploading", 1, [1])
    last = save.write(1, [b"weights of 1", b"index of 1"])
    assert (last["state"], last["sealed_ranks"], last["missing_ranks"]) == ("committed", 2, [])
    assert last["health"] == "ok"
    assert last["logical_bytes"] == last["chunk_bytes"] == last["uploaded_bytes"] == 50
    assert last["components"] == {"model": {"kind": "model", "logical_bytes": 50}}
    assert last["metrics"] == {"loss": {"value": 1.5, "nonfinite": None}}
    assert save.now() == last
