"""The metric curves of a run: told with heartbeats, each point once, bounded, and read along the lineage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import func, select

from holdfast_protocol.runs import MOST_CURVES, MOST_POINTS_TOLD
from holdfast_protocol.states import Scope
from holdfast_service.curves.points import MOST_POINTS, THINNED_AT_ONCE
from holdfast_service.db.tables.curves import Curve, CurvePoint
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.settings import ServiceSettings
from tests.service.conftest import Clock
from tests.service.test_statements_of_a_save import statements_of
from tests.support.rank import Job, Refused, answer
from tests.support.retention import purge
from tests.support.service import RunningService, running_service

LOSS = {"loss": [[1, 3.0], [2, 2.5], [3, 2.0]]}


def history(job: Job, **asked: Any) -> Any:
    return answer(job.http.get(f"{job.base}/metrics-history", params=asked))


def curve(job: Job, name: str = "loss", **asked: Any) -> list[tuple[int, int, float | str]]:
    """(attempt, step, value)."""
    (found,) = history(job, name=name, **asked)["metrics"]
    return [(point["attempt"], point["step"], point["nonfinite"] or point["value"]) for point in found["points"]]


def rows(service: RunningService) -> int:
    with service.context.database.read() as session:
        return session.scalar(select(func.count()).select_from(CurvePoint)) or 0


def test_what_heartbeats_and_the_end_tell_is_the_curve(service: RunningService) -> None:
    job = Job(service.http())
    assert job.heartbeat(3, metrics=LOSS | {"grad_norm": [[3, "inf"], [2, 1]]})["metrics_left_out"] == []
    job.heartbeat(3, metrics={"loss": []})
    job.end(step=5, metrics={"loss": [[5, "nan"], [4, -1e-300]]})
    assert curve(job) == [(1, 1, 3.0), (1, 2, 2.5), (1, 3, 2.0), (1, 4, -1e-300), (1, 5, "nan")]
    assert curve(job, "grad_norm") == [(1, 2, 1.0), (1, 3, "inf")]
    whole = history(job)
    assert (whole["names"], [each["name"] for each in whole["metrics"]]) == (["grad_norm", "loss"],) * 2
    assert (whole["attempt"], whole["segments"]) == (None, [{"attempt": 1, "max_step": None}])
    assert curve(job, from_step=2, to_step=3) == [(1, 2, 2.5), (1, 3, 2.0)]
    assert history(job, name="speed")["metrics"] == []


def test_a_heartbeat_that_comes_twice_or_late_doubles_and_changes_no_point(service: RunningService) -> None:
    job = Job(service.http())
    job.heartbeat(3, metrics=LOSS)
    job.heartbeat(5, metrics={"loss": [[4, 1.5], [5, 1.0]]})
    once = curve(job)
    job.heartbeat(3, metrics=LOSS)
    job.heartbeat(3, metrics={"loss": [[2, 99.0], [2, 98.0]]})
    assert curve(job) == once
    assert rows(service) == 5


def test_two_services_that_take_the_same_report_at_once_write_each_point_once(settings: ServiceSettings) -> None:
    with ExitStack() as stack:
        services = [stack.enter_context(running_service(settings)) for _ in range(2)]
        job = Job(services[0].http())
        told = {f"m{number}": [[step, step / 10] for step in range(100)] for number in range(8)}
        with ThreadPoolExecutor(4) as pool:
            https = [service.http() for service in services * 4]
            beats = [
                pool.submit(
                    http.post, f"{job.base}/attempts/1/heartbeat", json=job.fence | {"step": 99, "metrics": told}
                )
                for http in https
            ]
            assert [beat.result().status_code for beat in beats] == [200] * 8
        assert rows(services[0]) == 800
        with services[0].context.database.read() as session:
            assert set(session.scalars(select(Curve.points))) == {100}


def test_a_fenced_attempt_writes_no_point(service: RunningService) -> None:
    stale = Job(service.http())
    stale.heartbeat(3, metrics=LOSS)
    job = Job(service.http(), after=1)
    for say in (stale.heartbeat, stale.end):
        with pytest.raises(Refused, match="409 stale_attempt"):
            say(step=4, metrics={"loss": [[4, 0.0]], "late": [[4, 0.0]]})
    assert rows(service) == 3
    assert history(job)["names"] == ["loss"]


def test_a_rollback_cuts_the_curve_and_the_attempt_keeps_its_own(service: RunningService) -> None:
    first = Job(service.http())
    saved = first.save(2)
    first.save(4)
    first.heartbeat(5, metrics={"loss": [[step, 1.0] for step in range(1, 5)] + [[5, 77.0]]})
    second = Job(service.http(), after=1)
    assert [point[1] for point in curve(second)] == [1, 2, 3, 4, 5], "an attempt that has loaded nothing yet hides none"
    second.resumed_from(saved["id"], rollback=True)
    assert curve(second) == [(1, 1, 1.0), (1, 2, 1.0)]
    second.heartbeat(4, metrics={"loss": [[3, 0.5], [4, 0.4]]})
    assert curve(second) == [(1, 1, 1.0), (1, 2, 1.0), (2, 3, 0.5), (2, 4, 0.4)], "before it has committed anything"
    assert history(second)["segments"] == [{"attempt": 2, "max_step": None}, {"attempt": 1, "max_step": 2}]
    assert curve(second, attempt=1)[-1] == (1, 5, 77.0)
    assert [point[1] for point in curve(second, attempt=2)] == [3, 4]
    third = Job(service.http(), after=2)  # from nothing, though there was something: it descends from none of them
    third.heartbeat(1, metrics={"loss": [[1, 9.0]]})
    with statements_of(service.context.database) as statements:
        assert curve(third) == [(3, 1, 9.0)]
    (reads,) = (each for each in statements if "FROM curve_points" in each)
    assert "curve_points.attempt IN" in reads, "the points of attempts beside the line are not read"
    with pytest.raises(Refused, match="404 attempt_not_found"):
        curve(third, attempt=9)


def test_a_million_steps_are_bounded_rows_and_hide_no_spike(service: RunningService) -> None:
    """What a job at 300 steps a second tells: it thins what is more than a report may have, as the service does."""
    job = Job(service.http())
    steps, each = 1_000_000, 40
    spikes = {123_480: 1e6, 777_760: -1e6}
    told, most = 0, 0
    for first in range(0, steps, each * 500):
        points = [[step, spikes.get(step, math.sin(step / 1e5))] for step in range(first, first + each * 500, each)]
        job.heartbeat(points[-1][0], metrics={"loss": points})
        told += len(points)
        most = max(most, rows(service))
    job.heartbeat(steps, metrics={"loss": [[steps, "nan"]]})
    assert told == 25_000
    assert most <= MOST_POINTS
    found = curve(job)
    assert len(found) <= 500
    assert {step: value for _, step, value in found if step in spikes} == spikes
    assert found[-1] == (1, steps, "nan")
    gaps = [later[1] - earlier[1] for earlier, later in pairwise(found)]
    assert max(gaps) < steps / 20, "the whole run is there, not only its end"
    with service.context.database.read() as session:
        assert session.scalar(select(Curve.points)) == rows(service), "the count that is kept is the count"
    assert len(curve(job, points=4)) <= 4


def test_metrics_that_get_too_long_together_are_thinned_a_few_at_a_time(service: RunningService) -> None:
    """The run's lock is held meanwhile."""
    job = Job(service.http())
    names, each = [f"m{number}" for number in range(8)], MOST_POINTS_TOLD // 8
    thinned, longest = [], []
    for first in range(0, MOST_POINTS + 8 * each, each):
        told = {name: [[step, 1e6 if step == 777 else 1.0] for step in range(first, first + each)] for name in names}
        with statements_of(service.context.database) as statements:
            job.heartbeat(first + each, metrics=told)
        thinned.append(sum("DELETE FROM curve_points" in statement for statement in statements))
        with service.context.database.read() as session:
            longest.append(session.scalar(select(func.max(Curve.points))))
    assert max(thinned) == THINNED_AT_ONCE
    assert sum(thinned) >= len(names), "each had its turn"
    assert longest[-1] <= MOST_POINTS < max(longest) <= MOST_POINTS + 4 * each
    with service.context.database.read() as session:
        assert session.scalar(select(func.sum(Curve.points))) == rows(service), "the kept counts are true"
    for name in names:
        assert (1, 777, 1e6) in curve(job, name)


def test_many_attempts_of_few_steps_are_bounded_too(service: RunningService) -> None:
    http = service.http()
    for number in range(60):
        job = Job(http, after=number)
        job.heartbeat(50, metrics={"loss": [[step, float(number)] for step in range(50)]})
    assert rows(service) <= MOST_POINTS
    assert curve(job)[-1][0] == 60


def test_a_heartbeat_without_points_asks_the_database_no_more_than_before_and_one_with_points_little(
    service: RunningService,
) -> None:
    job = Job(service.http())
    job.heartbeat(1, metrics={"loss": [[1, 1.0]], "lr": [[1, 1.0]]})
    with statements_of(service.context.database) as without:
        job.heartbeat(2)
    many = {"loss": [[step, 1.0] for step in range(2, 402)], "lr": [[step, 1.0] for step in range(2, 402)]}
    with statements_of(service.context.database) as with_points:
        job.heartbeat(401, metrics=many)
    assert not any("curve" in statement for statement in without)
    assert len(with_points) == len(without) + 3, "\n".join(with_points)


def test_only_so_many_metrics_get_a_curve_and_the_job_hears_of_the_others(service: RunningService) -> None:
    job = Job(service.http())
    job.heartbeat(1, metrics={f"a{number:03}": [[1, 1.0]] for number in range(MOST_CURVES - 1)})
    reply = job.heartbeat(2, metrics={"b1": [[2, 1.0]], "b2": [[2, 1.0]], "a001": [[2, 2.0]]})
    assert reply["metrics_left_out"] == ["b2"]
    found = history(job, points=2000)
    assert len(found["names"]) == MOST_CURVES
    assert curve(job, "a001") == [(1, 1, 1.0), (1, 2, 2.0)]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"loss": [[1, "high"]]}, "valid number"),
        ({"loss": [[1, "1.5"]]}, "valid number"),
        ({"loss": [[-1, 1.0]]}, "greater than or equal to 0"),
        ({"loss": [[1, 1.0, 2.0]]}, "at most 2 items"),
        ({"": [[1, 1.0]]}, "at least 1 character"),
        ({"a\nb": [[1, 1.0]]}, "control characters"),
        ({f"m{number}": [[1, 1.0]] for number in range(MOST_CURVES + 1)}, f"at most {MOST_CURVES}"),
        ({name: [[step, 1.0] for step in range(MOST_POINTS_TOLD - 1)] for name in "ab"}, "are the most"),
    ],
)
def test_what_is_no_measurement_is_refused(service: RunningService, told: object, said: str) -> None:
    job = Job(service.http())
    with pytest.raises(Refused, match=said):
        job.heartbeat(1, metrics=told)
    assert rows(service) == 0


def test_the_largest_report_is_taken(service: RunningService) -> None:
    job = Job(service.http())
    name = "\U0001f4c9" * 98
    each = MOST_POINTS_TOLD // MOST_CURVES
    points = [[2**62 - step, -1.2345678901234567e-300] for step in range(each)]
    told = {f"{name}{number:02}": points for number in range(MOST_CURVES)}
    job.end("failed", step=2**62, detail="\U0001f4c9" * 4000, metrics=told)
    assert rows(service) == each * MOST_CURVES
    found = curve(job, f"{name}00")
    assert found[-1] == (1, 2**62, -1.2345678901234567e-300)


def test_the_curve_goes_with_its_run(service: RunningService, clock: Clock) -> None:
    job = Job(service.http())
    job.heartbeat(3, metrics=LOSS)
    job.end()
    seen = answer(job.http.request("DELETE", job.base, json={"dry_run": True}))["etag"]
    answer(job.http.request("DELETE", job.base, json={}, headers={"If-Match": seen}))
    assert rows(service) == 3, "in the trash it can be taken back whole"
    clock.advance(365 * 86400)
    purge(service)
    assert rows(service) == 0


def test_another_projects_token_sees_no_curve(service: RunningService) -> None:
    job = Job(service.http())
    job.heartbeat(3, metrics=LOSS)
    service.make_project("other")
    stranger = service.http(token=service.token(Scope.READ, project="other"))
    with pytest.raises(Refused, match="403 forbidden"):
        answer(stranger.get(f"{job.base}/metrics-history"))


def tags_of(http: Any, base: str, edit: dict[str, Any], etag: str | None) -> Any:
    headers = {} if etag is None else {"If-Match": etag}
    return answer(http.patch(base, json=edit, headers=headers))


@pytest.fixture
def runs(service: RunningService) -> Iterator[list[Job]]:
    with service.http() as http:
        yield [Job(http, f"demo/{name}", create=True) for name in ("one", "two")]


def test_people_tag_a_run_note_on_it_and_find_it(service: RunningService, runs: list[Job]) -> None:
    one, two = runs
    seen = answer(one.http.get(one.base))
    assert (seen["tags"], seen["note"]) == ([], "")
    edited = tags_of(one.http, one.base, {"tags": ["b", "a", "b"], "note": "first\nsecond"}, seen["etag"])
    assert (edited["tags"], edited["note"]) == (["a", "b"], "first\nsecond")
    assert edited["etag"] != seen["etag"]
    assert one.http.get(one.base).headers["ETag"] == edited["etag"]
    same = tags_of(one.http, one.base, {"tags": ["a", "b"]}, seen["etag"])
    assert same["etag"] == edited["etag"], "a repeated edit whose reply was lost"
    with pytest.raises(Refused, match="412 edit_conflict"):
        tags_of(one.http, one.base, {"tags": []}, seen["etag"])
    with pytest.raises(Refused, match="428 edit_needs_version"):
        tags_of(two.http, two.base, {"tags": ["a"]}, None)
    tags_of(two.http, two.base, {"tags": ["a"]}, "*")
    listed = {
        tag: [run["name"] for run in answer(one.http.get("/v1/projects/demo/runs", params={"tag": tag}))["items"]]
        for tag in ("a", "b", "c")
    }
    assert {tag: sorted(names) for tag, names in listed.items()} == {"a": ["one", "two"], "b": ["one"], "c": []}
    back = tags_of(one.http, one.base, {"tags": [], "note": ""}, edited["etag"])
    assert back["etag"] == seen["etag"], "it follows from what it is of, as after a rebuild"
    edited = tags_of(one.http, one.base, {"tags": ["a", "b"], "note": "first"}, back["etag"])
    cleared = tags_of(one.http, one.base, {"note": ""}, edited["etag"])
    assert (cleared["tags"], cleared["note"]) == (["a", "b"], "")
    one.heartbeat(1)  # a job's own calls change no version
    assert answer(one.http.get(one.base))["etag"] == cleared["etag"]


def test_the_audit_log_keeps_how_long_a_note_is_and_not_the_note(service: RunningService, runs: list[Job]) -> None:
    tags_of(runs[0].http, runs[0].base, {"tags": ["a"], "note": "my secret"}, "*")
    tags_of(runs[0].http, runs[0].base, {"note": "my SECRET"}, "*")
    with service.context.database.read() as session:
        events = session.execute(
            select(AuditEvent.before, AuditEvent.after).where(AuditEvent.action == "run.edit").order_by(AuditEvent.id)
        ).all()
    assert [tuple(event) for event in events] == [
        ({"tags": [], "note_characters": 0}, {"tags": ["a"], "note_characters": 9}),
        ({"note_characters": 9}, {"note_characters": 9}),
    ]


def test_only_an_operator_edits_a_run(service: RunningService, runs: list[Job]) -> None:
    trainer = service.http(token=service.token(Scope.TRAIN, Scope.READ))
    with pytest.raises(Refused, match="403 forbidden"):
        tags_of(trainer, runs[0].base, {"tags": ["a"]}, "*")
    for wrong in ({"tags": ["a b"]}, {"tags": ["x"] * 21}, {"note": "x" * 4001}, {"name": "other"}):
        with pytest.raises(Refused, match="invalid_request"):
            tags_of(runs[0].http, runs[0].base, wrong, "*")
