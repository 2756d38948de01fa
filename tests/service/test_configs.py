"""What an attempt was told to train, and what is another than before."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from holdfast_protocol.states import Scope
from holdfast_service.db.tables.core import Attempt
from tests.service.conftest import Clock
from tests.support.rank import Job, Refused, answer
from tests.support.retention import purge
from tests.support.service import RunningService

FIRST = {"model": {"layers": 12, "tied": True}, "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "seed": 1}
SECOND = {"model": {"layers": 12, "tied": 1}, "optimizer": {"lr": 0.2, "betas": [0.9]}, "seed": 1.0, "note": None}


def config_of(job: Job, number: int, **asked: int) -> dict[str, object]:
    view: dict[str, object] = answer(job.http.get(f"{job.base}/attempts/{number}/config", params=asked))
    return view


def test_an_attempt_shows_its_configuration_and_what_is_another_than_before(service: RunningService) -> None:
    first = Job(service.http(), config=FIRST)
    Job(service.http(), after=1)  # gives none, and is passed over
    third = Job(service.http(), after=2, config=SECOND)
    assert config_of(first, 1) == {
        "attempt": 1, "config": FIRST, "compared_with": None, "differences": [], "differences_left_out": 0
    }  # fmt: skip
    found = config_of(third, 3)
    assert (found["config"], found["compared_with"]) == (SECOND, 1)
    assert found["differences"] == [
        {"path": "model.tied", "before": True, "after": 1, "change": "changed"},
        {"path": "note", "before": None, "after": None, "change": "added"},
        {"path": "optimizer.betas[1]", "before": 0.95, "after": None, "change": "removed"},
        {"path": "optimizer.lr", "before": 0.1, "after": 0.2, "change": "changed"},
    ]
    assert config_of(third, 2)["config"] is None
    assert config_of(third, 1, against=3)["compared_with"] == 3
    for number, asked in ((9, {}), (1, {"against": 9})):
        with pytest.raises(Refused, match="404 attempt_not_found"):
            config_of(third, number, **asked)


def test_the_same_launch_gets_the_same_attempt_and_keeps_its_first_configuration(service: RunningService) -> None:
    job = Job(service.http(), launch_id="one", config=FIRST)
    again = Job(service.http(), launch_id="one", config=SECOND)
    assert again.number == job.number
    assert config_of(job, 1)["config"] == FIRST


def test_many_differences_are_cut(service: RunningService) -> None:
    for number in range(2):
        job = Job(service.http(), after=number, config={"all": {f"k{each:04}": number for each in range(1200)}})
    found = config_of(job, 2)
    assert (len(found["differences"]), found["differences_left_out"]) == (1000, 200)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"text": "x" * 70_000}, "65536 are the most"),
        ({"a": {"nul": "\0"}}, "no database keeps"),
        ({"a": {"\0": 1}}, "no database keeps"),
        ([1], "be an object"),
        ({"k" * 30_000: [0] * 10_000}, "paths to its values are too long"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_older_attempts_are_fenced(
    service: RunningService, config: object, said: str
) -> None:
    job = Job(service.http())
    with pytest.raises(Refused, match=said):
        Job(service.http(), after=1, config=config)
    job.heartbeat(1)


def test_a_deep_one_is_refused(service: RunningService) -> None:
    config: dict[str, object] = {}
    for _ in range(40):
        config = {"a": config}
    with pytest.raises(Refused, match="levels deep"):
        Job(service.http(), config=config)


def test_a_purged_run_leaves_none(service: RunningService, clock: Clock) -> None:
    job = Job(service.http(), config=FIRST)
    job.end()
    answer(service.http().request("DELETE", job.base, json={}, headers={"If-Match": "*"}))
    clock.advance(60 * 86400)
    purge(service)
    with service.context.database.read() as session:
        assert session.scalars(select(Attempt.config)).all() == [None]


def test_trainers_and_readers_may_look_and_others_may_not(service: RunningService) -> None:
    job = Job(service.http(), config=FIRST)
    for scope in (Scope.READ, Scope.TRAIN):
        assert answer(service.http(token=service.token(scope)).get(f"{job.base}/attempts/1/config"))["config"] == FIRST
    with pytest.raises(Refused, match="403 forbidden"):
        answer(service.http(token=service.token(Scope.OPERATE)).get(f"{job.base}/attempts/1/config"))
