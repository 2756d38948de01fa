"""Two checkpoints side by side: configuration, metrics, components, shared chunks; and who may ask."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_protocol.attempts import MOST_DIFFERENCES
from holdfast_protocol.states import Scope
from tests.support.rank import Job, Refused, answer
from tests.support.service import RunningService

COMMON, OWN, OTHER = b"common" * 100, b"own" * 100, b"other" * 100


def diff(service: RunningService, before: str, after: str, token: str | None = "") -> Any:
    http = service.http() if token == "" else service.http(token=token)
    return answer(http.get(f"/v1/checkpoints/{after}/diff", params={"against": before}))


def saved(job: Job, step: int, *chunks: bytes, **seal: Any) -> str:
    """By one rank. Its last chunk is the index."""
    save = job.begin(step)
    save.write(0, [*chunks, b"index %d" % step], **seal)
    return save.id


def component(size: int) -> dict[str, Any]:
    return {"kind": "model", "logical_bytes": size}


def metric(value: float) -> dict[str, Any]:
    return {"value": value}


def test_configuration_metrics_components_and_shared_chunks_stand_side_by_side(service: RunningService) -> None:
    first = Job(service.http(), world_size=1, config={"lr": 0.1, "layers": 12, "old": 1})
    one = saved(
        first, 10, COMMON, OWN,
        metrics={"loss": metric(2.0), "accuracy": metric(0.5)},
        components={"model": component(100), "ema": component(7)},
    )  # fmt: skip
    second = Job(service.http(), after=1, world_size=1, config={"lr": 0.2, "layers": 12, "new": [1]})
    two = saved(
        second, 20, COMMON, OTHER,
        metrics={"loss": metric(1.0), "bleu": metric(3.0)}, components={"model": component(120)},
    )  # fmt: skip
    found = diff(service, one, two)
    assert (found["before"]["id"], found["after"]["id"]) == (one, two)
    assert found["config"] == [
        {"path": "lr", "before": 0.1, "after": 0.2, "change": "changed"},
        {"path": "new[0]", "before": None, "after": 1, "change": "added"},
        {"path": "old", "before": 1, "after": None, "change": "removed"},
    ]
    assert [(each["name"], _value(each["before"]), _value(each["after"])) for each in found["metrics"]] == [
        ("accuracy", 0.5, None),
        ("bleu", None, 3.0),
        ("loss", 2.0, 1.0),
    ]
    assert [(each["name"], _size(each["before"]), _size(each["after"])) for each in found["components"]] == [
        ("ema", 7, None),
        ("model", 100, 120),
    ]
    assert (found["shared_chunks"], found["shared_bytes"]) == (1, len(COMMON))
    turned = diff(service, two, one)
    assert turned["config"][0] == {"path": "lr", "before": 0.2, "after": 0.1, "change": "changed"}
    assert turned["shared_bytes"] == len(COMMON)


def _value(found: dict[str, Any] | None) -> Any:
    return None if found is None else found["value"]


def _size(found: dict[str, Any] | None) -> Any:
    return None if found is None else found["logical_bytes"]


def test_a_checkpoint_is_the_same_as_itself_and_a_chunk_that_two_ranks_have_counts_once(
    service: RunningService,
) -> None:
    job = Job(service.http(), world_size=2, config={"lr": 0.1})
    save = job.begin(10)
    for rank in range(2):
        save.write(rank, [COMMON, b"index %d" % rank])
    found = diff(service, save.id, save.id)
    assert found["config"] == []
    assert (found["shared_chunks"], found["shared_bytes"]) == (3, found["before"]["chunk_bytes"])


def test_checkpoints_of_two_projects_are_compared_by_digest_and_never_for_who_sees_one_alone(
    service: RunningService,
) -> None:
    one = saved(Job(service.http(), "ours/gpt", world_size=1), 10, COMMON)
    two = saved(Job(service.http(), "theirs/gpt", world_size=1), 20, COMMON)
    found = diff(service, one, two)
    assert (found["before"]["project"], found["after"]["project"]) == ("ours", "theirs")
    assert (found["shared_chunks"], found["shared_bytes"]) == (1, len(COMMON))
    assert found["config"] is None, "neither attempt gave one"
    ours = service.token(project="ours")
    assert diff(service, one, one, ours)["after"]["id"] == one
    for before, after in ((one, two), (two, one), (two, two)):
        with pytest.raises(Refused, match="404 checkpoint_not_found") as refused:
            diff(service, before, after, ours)
        assert two in str(refused.value)
        assert "theirs" not in str(refused.value)
    with pytest.raises(Refused, match="403 forbidden"):
        diff(service, one, two, service.token(Scope.TRAIN))


def test_what_is_not_whole_or_not_there_cannot_be_compared(service: RunningService) -> None:
    job = Job(service.http(), world_size=1)
    whole = saved(job, 10, COMMON)
    open_save, aborted = job.begin(20), job.begin(30)
    aborted.abort()
    for other, problem in (
        (open_save.id, "409 incomplete_checkpoint"),
        (aborted.id, "checkpoint_aborted"),
        ("ck_none", "404 checkpoint_not_found"),
    ):
        for pair in ((whole, other), (other, whole)):
            with pytest.raises(Refused, match=problem):
                diff(service, *pair)
    with pytest.raises(Refused, match="422 invalid_request"):
        answer(service.http().get(f"/v1/checkpoints/{whole}/diff"))


def test_configurations_that_differ_much_are_cut_and_one_that_is_missing_is_no_difference(
    service: RunningService,
) -> None:
    ids = []
    for number, config in enumerate([{"a": [1] * (MOST_DIFFERENCES + 5)}, {"a": 1}, None]):
        job = Job(service.http(), after=number, world_size=1, config=config)
        ids.append(saved(job, number, COMMON))
    found = diff(service, ids[0], ids[1])
    assert (len(found["config"]), found["config_left_out"]) == (MOST_DIFFERENCES, 6)
    assert diff(service, ids[0], ids[2])["config"] is None
