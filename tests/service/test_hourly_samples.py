"""The hourly samples: they say what the service said then, an hour has one, and what was missed stays missing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, insert, select
from typer.testing import CliRunner

import holdfast_service.samples.take
from holdfast_client.cli.main import app
from holdfast_protocol.states import Scope
from holdfast_protocol.usage import ProjectSample, RunSample
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Project, Run
from holdfast_service.db.tables.samples import ProjectSampleRow, RunSampleRow
from holdfast_service.samples.controller import NAME, backlog, reconcile
from holdfast_service.samples.take import HOUR, last_hour
from holdfast_service.settings import ServiceSettings
from tests.service.conftest import Clock
from tests.service.test_statements_of_a_save import statements_of
from tests.support.dashboards import read_view
from tests.support.death import Killed, kill
from tests.support.rank import Job, answer
from tests.support.service import RunningService, running_service
from tests.support.tallies import take_up


def now(service: RunningService) -> datetime:
    with service.context.database.read() as session:
        return database_now(session)


def let_the_hour_end(service: RunningService, clock: Clock, *, hours: int = 1) -> datetime:
    """The begin of the hour that is over now. A minute into the next one, so that a slow machine stays within it."""
    end = now(service).replace(minute=0, second=0, microsecond=0) + hours * HOUR
    clock.advance((end - now(service)).total_seconds() + 60)
    return last_hour(now(service))


def samples(service: RunningService, what: str, *, token: str = "", **wanted: Any) -> list[dict[str, Any]]:
    project, _, run = what.partition("/")
    path = f"/v1/projects/{project}" + (f"/runs/{run}" if run else "")
    return answer(service.http(token=token).get(f"{path}/samples", params=wanted))["items"]  # type: ignore[no-any-return]


def since(sample: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(sample["since"])


def counts(service: RunningService) -> tuple[int, int]:
    with service.context.database.read() as session:
        return tuple(
            session.scalar(select(func.count()).select_from(table)) or 0 for table in (ProjectSampleRow, RunSampleRow)
        )  # type: ignore[return-value]


def trained(service: RunningService, run: str = "demo/gpt", *, steps: int = 100) -> Job:
    """A job that has saved, and told where its time went."""
    job = Job(service.http(), run)
    job.save(steps)
    job.heartbeat(steps, first_step=1, first_step_age_seconds=0.5, progress_age_seconds=0.0, steps_run=steps)
    return job


def test_a_sample_says_what_the_service_says_of_the_same_moment(service: RunningService, clock: Clock) -> None:
    job = trained(service)
    trained(service, "demo/bert").end("finished")
    answer(
        service.http().put(
            "/v1/prices",
            json={
                "currency": "EUR",
                "as_of": "2026-11-01",
                "source": "a contract",
                "prices": [{"store_kind": "posix", "storage_class": None, "per_gib_month": 2.0}],
            },
            headers={"If-Match": "*"},
        )
    )
    hour = let_the_hour_end(service, clock)
    job.heartbeat(200, steps_run=200, progress_age_seconds=0.0)
    take_up(service)
    report = reconcile(service.context)
    assert (report.done, report.failed, report.missed_hours) == (1, 0, 0)
    http = service.http()
    usage = answer(http.get("/v1/projects/demo/usage"))
    cost = answer(http.get("/v1/projects/demo/cost"))
    run = answer(http.get("/v1/projects/demo/runs/gpt"))
    (of_project,), (of_run,) = samples(service, "demo"), samples(service, "demo/gpt")
    assert samples(service, "demo/bert") == [], "it has ended: its hours are those of its project"
    for sample in (of_project, of_run):
        assert since(sample) == hour
        assert (sample["hours"], sample["missed_hours"]) == (1, 0)
        taken = datetime.fromisoformat(sample["taken_at"])
        assert hour + HOUR <= taken <= now(service)
        age = (taken - datetime.fromisoformat(run["restore_point"]["committed_at"])).total_seconds()
        assert sample["restore_point_age_seconds"] == pytest.approx(age, abs=5)
        assert sample["restore_point_age_seconds"] > 60
    assert of_project["logical_bytes"] == usage["logical_bytes"] > of_run["logical_bytes"] == run["logical_bytes"] > 0
    assert of_project["stored_bytes"] == usage["stored_bytes"] > 0
    assert of_project["stores"] == {"primary": usage["stored_bytes"]}
    assert (of_project["currency"], of_project["per_month"]) == ("EUR", cost["per_month"])
    assert of_project["per_month"] > 0
    assert of_project["unpriced_bytes"] == 0
    assert (of_project["committed_checkpoints"], of_run["committed_checkpoints"]) == (2, 1)
    assert (of_project["live_runs"], of_project["runs_without_restore_point"]) == (1, 0)
    assert (of_run["last_step"], of_run["restore_point_step"]) == (200, 100)


def test_goodput_is_that_of_the_hour(service: RunningService, clock: Clock) -> None:
    """A job that has run for longer than an hour: an hour has what was told since the one before, and they add up."""
    job = trained(service)
    first = let_the_hour_end(service, clock)
    reconcile(service.context)
    second = let_the_hour_end(service, clock)
    job.heartbeat(300_000, steps_run=300_000, progress_age_seconds=1000.0)
    reconcile(service.context)
    found = answer(service.http().get("/v1/projects/demo/runs/gpt/goodput"))
    assert 0.5 < found["goodput"] < 0.95
    newest, older = samples(service, "demo/gpt")
    assert (since(newest), since(older)) == (second, first)
    assert newest["wall_seconds"] == pytest.approx(3600)
    since_the_first = min(3600.0, found["productive_seconds"])  # it had told of no second then
    assert newest["productive_seconds"] == pytest.approx(since_the_first, rel=0.01)
    assert newest["goodput"] == pytest.approx(since_the_first / 3600, rel=0.01)
    (day,) = samples(service, "demo", every="day")[:1]
    if first.date() == second.date():  # around midnight they are two days
        assert day["hours"] == 2
        total = newest["productive_seconds"] + older["productive_seconds"]
        assert day["productive_seconds"] == pytest.approx(total)
        assert day["goodput"] == pytest.approx(total / (newest["wall_seconds"] + older["wall_seconds"]))
    (of_project, _) = samples(service, "demo")
    assert {name: of_project[name] for name in ("goodput", "wall_seconds", "productive_seconds")} == {
        name: newest[name] for name in ("goodput", "wall_seconds", "productive_seconds")
    }


def test_an_hour_in_which_a_job_hung_has_no_goodput_of_the_hours_before(service: RunningService, clock: Clock) -> None:
    job = trained(service)
    let_the_hour_end(service, clock, hours=10)
    job.heartbeat(300_000, steps_run=300_000, progress_age_seconds=1.0)
    reconcile(service.context)
    for hung in (1, 2):
        hour = let_the_hour_end(service, clock)
        job.heartbeat(300_000, steps_run=300_000, progress_age_seconds=3600.0 * hung)
        reconcile(service.context)
        for what in ("demo", "demo/gpt"):
            newest, *_, oldest = samples(service, what)
            assert since(newest) == hour
            assert (newest["goodput"], newest["wall_seconds"]) == (pytest.approx(0.0, abs=0.01), 3600)
            assert oldest["goodput"] > 0.9
    assert answer(service.http().get("/v1/projects/demo/runs/gpt/goodput"))["goodput"] > 0.7


def test_a_run_that_was_opened_after_the_hour_has_no_sample_of_it(service: RunningService, clock: Clock) -> None:
    trained(service)
    let_the_hour_end(service, clock)
    clock.advance(1800)  # the pass is late
    trained(service, "demo/bert")
    reconcile(service.context)
    assert samples(service, "demo/bert") == []
    assert [each["live_runs"] for each in samples(service, "demo")] == [1]


def test_what_a_clock_has_dated_that_was_ahead_is_sampled_as_soon_as_the_clock_is_right(
    service: RunningService, clock: Clock
) -> None:
    ahead = 400 * 86400
    clock.advance(ahead)
    trained(service)
    trained(service, "demo/bert").end("finished")
    let_the_hour_end(service, clock)
    reconcile(service.context)
    clock.advance(-ahead)
    hour = let_the_hour_end(service, clock)
    assert reconcile(service.context).done == 1
    (of_project,), (of_run,) = samples(service, "demo"), samples(service, "demo/gpt")
    assert (since(of_project), since(of_run)) == (hour, hour)
    assert (of_project["live_runs"], of_project["wall_seconds"]) == (1, 0), "when the other one ended is not known"
    assert of_run["restore_point_age_seconds"] == 0


def test_a_pass_reads_no_more_for_many_projects_than_for_one_and_no_sweeps(
    service: RunningService, clock: Clock
) -> None:
    asked = []
    for names in (["a"], ["b", "c", "d", "e"]):
        for name in names:
            service.make_project(name)
        let_the_hour_end(service, clock)
        with statements_of(service.context.database) as statements:
            reconcile(service.context)
        assert not any("FROM store_maintenance" in statement for statement in statements)
        asked.append(sum(statement.startswith("SELECT") for statement in statements))
    assert len(samples(service, "e")) == 1
    assert asked[1] == asked[0]


def test_nothing_that_ran_has_no_goodput_and_no_age(service: RunningService, clock: Clock) -> None:
    service.make_project("empty")
    Job(service.http(), "demo/new")
    let_the_hour_end(service, clock)
    reconcile(service.context)
    (empty,), (new,), (run,) = samples(service, "empty"), samples(service, "demo"), samples(service, "demo/new")
    assert (empty["goodput"], empty["wall_seconds"], empty["live_runs"]) == (None, 0, 0)
    assert (new["live_runs"], new["runs_without_restore_point"]) == (1, 1)
    for sample in (empty, new, run):
        assert (sample["restore_point_age_seconds"], sample["goodput"]) == (None, None)


def test_an_hour_has_one_sample_however_often_a_pass_looks(service: RunningService, clock: Clock) -> None:
    trained(service)
    let_the_hour_end(service, clock)
    assert reconcile(service.context).done == 1
    before = samples(service, "demo") + samples(service, "demo/gpt")
    trained(service, "demo/bert")
    service.make_project("late")
    clock.advance(600)
    assert reconcile(service.context).idle
    assert samples(service, "demo") + samples(service, "demo/gpt") == before
    assert samples(service, "late") == [], "it was not there in that hour"


@pytest.mark.races
def test_two_services_at_once_take_one_sample(settings: ServiceSettings, clock: Clock) -> None:
    with running_service(settings) as one, running_service(settings) as two:
        for name in ("a", "b", "c"):
            trained(one, f"{name}/gpt")
        for hours in range(1, 4):
            let_the_hour_end(one, clock)
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda at: reconcile((one, two)[at % 2].context), range(4)))
            assert counts(one) == (3 * hours, 3 * hours)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [True, False])
def test_a_pass_that_was_killed_is_gone_on_with(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch, at: int, after: bool
) -> None:
    monkeypatch.setattr(holdfast_service.samples.take, "AT_ONCE", 2)
    for name in ("a", "b", "c"):
        trained(service, f"{name}/gpt")
    let_the_hour_end(service, clock)
    with monkeypatch.context() as broken:
        kill(broken, holdfast_service.samples.take, "insert_absent", after=after, at=at)
        with pytest.raises(Killed):
            reconcile(service.context)
    half = counts(service)
    reconcile(service.context)
    assert half <= counts(service) == (3, 3)
    for name in ("a", "b", "c"):
        (sample,) = samples(service, name)
        assert sample["live_runs"] == 1
        assert sample["goodput"] is not None


def test_hours_that_were_missed_stay_a_gap_and_are_told(service: RunningService, clock: Clock) -> None:
    job = trained(service)
    first = let_the_hour_end(service, clock)
    reconcile(service.context)
    let_the_hour_end(service, clock, hours=5)  # nobody serves in hours 1 to 4
    report = reconcile(service.context)
    assert (report.done, report.missed_hours) == (1, 4)
    job.end("finished")
    let_the_hour_end(service, clock)
    reconcile(service.context)
    let_the_hour_end(service, clock, hours=2)
    again = Job(service.http(), after=1)
    let_the_hour_end(service, clock)
    reconcile(service.context)
    told = [(round((since(each) - first) / HOUR), each["missed_hours"]) for each in samples(service, "demo")]
    assert told == [(9, 2), (6, 0), (5, 4), (0, 0)]
    told = [(round((since(each) - first) / HOUR), each["missed_hours"]) for each in samples(service, "demo/gpt")]
    assert told == [(9, 2), (5, 4), (0, 0)], "in hour 6 it was not live, which is no gap"
    assert sum(day["missed_hours"] for day in samples(service, "demo", every="day")) == 6
    assert [each["missed_hours"] for each in samples(service, "demo", limit=1)] == [2], "of a page, too"
    later = samples(service, "demo", since=(first + 2 * HOUR).isoformat())
    assert [each["missed_hours"] for each in later] == [2, 0, 4]
    assert again.number == 2


def fill(service: RunningService, begin: datetime, hours: int) -> None:
    """A project and a run with a sample of each hour, numbered from 0."""
    with service.context.database.transaction() as session:
        project = session.execute(select(Project.id)).scalar_one()
        run = session.execute(select(Run.id)).scalar_one()
        common = [
            {
                "hour": begin + at * HOUR,
                "taken_at": begin + (at + 1) * HOUR + timedelta(seconds=3),
                "committed_checkpoints": at,
                "logical_bytes": at * 1000,
                "productive_seconds": 1800.0,
                "wall_seconds": 3600.0 if at % 2 else 1800.0,
                "restore_point_age_seconds": float(at % 24) or None,
            }
            for at in range(hours)
        ]
        more = {"stored_bytes": 7, "stores": {"primary": 7}, "currency": "USD", "per_month": 0.5, "unpriced_bytes": 0}
        more |= {"live_runs": 1, "runs_without_restore_point": 0}
        session.execute(insert(ProjectSampleRow), [row | more | {"project_id": project} for row in common])
        session.execute(insert(RunSampleRow), [row | {"run_id": run} for row in common])


@pytest.fixture
def filled(service: RunningService) -> datetime:
    """Three whole days and five hours, until the day before yesterday; the begin of the first day."""
    Job(service.http())
    begin = now(service).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=5)
    fill(service, begin, 77)
    return begin


@pytest.mark.parametrize("what", ["demo", "demo/gpt"])
def test_days_are_made_of_their_hours(service: RunningService, filled: datetime, what: str) -> None:
    days = samples(service, what, every="day")
    assert [(since(day) - filled).days for day in days] == [3, 2, 1, 0]
    assert [day["hours"] for day in days] == [5, 24, 24, 24]
    assert [day["committed_checkpoints"] for day in days] == [76, 71, 47, 23], "as the day ended"
    assert [day["restore_point_age_seconds"] for day in days] == [4, 23, 23, 23], "the greatest"
    whole = days[1]
    assert (whole["productive_seconds"], whole["wall_seconds"]) == (24 * 1800, 12 * 5400)
    assert whole["goodput"] == pytest.approx(2 / 3)
    assert [day["missed_hours"] for day in days] == [0, 0, 0, 0]


@pytest.mark.parametrize("what", ["demo", "demo/gpt"])
@pytest.mark.parametrize(("every", "count"), [("hour", 77), ("day", 4)])
@pytest.mark.parametrize("limit", [1, 3, 50])
def test_pages_are_the_whole(
    service: RunningService, filled: datetime, what: str, every: str, count: int, limit: int
) -> None:
    project, _, run = what.partition("/")
    path = f"/v1/projects/{project}" + (f"/runs/{run}" if run else "") + "/samples"
    model = RunSample if run else ProjectSample
    found, cursor = [], None
    while True:
        params = {"every": every, "limit": limit} | ({} if cursor is None else {"cursor": cursor})
        page = answer(service.http().get(path, params=params))
        found += [model.model_validate(each) for each in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert len(found) == count
    assert [each.model_dump(mode="json") for each in found] == samples(service, what, every=every, limit=500)
    assert [each.since for each in found] == sorted((each.since for each in found), reverse=True)


def test_a_span_has_its_begin_and_not_its_end(service: RunningService, filled: datetime) -> None:
    span = {"since": (filled + 10 * HOUR).isoformat(), "until": (filled + 13 * HOUR).isoformat()}
    assert [each["committed_checkpoints"] for each in samples(service, "demo", **span)] == [12, 11, 10]
    (day,) = samples(service, "demo/gpt", every="day", **span)
    assert (day["hours"], since(day)) == (3, filled)


@pytest.mark.parametrize(
    "wanted", [{"every": "minute"}, {"since": "yesterday"}, {"since": "1700000000"}, {"limit": 501}, {"cursor": "x"}]
)
def test_what_is_no_span_is_refused(service: RunningService, wanted: dict[str, Any]) -> None:
    service.make_project("demo")
    reply = service.http().get("/v1/projects/demo/samples", params=wanted)
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")


def test_a_cursor_is_good_in_its_own_list_only(service: RunningService, filled: datetime) -> None:
    http = service.http()
    cursor = answer(http.get("/v1/projects/demo/samples", params={"limit": 1}))["next_cursor"]
    for path, every in (("demo", "day"), ("demo/runs/gpt", "hour")):
        reply = http.get(f"/v1/projects/{path}/samples", params={"cursor": cursor, "every": every})
        assert reply.status_code == 422


def test_a_token_sees_the_samples_of_its_project(service: RunningService, filled: datetime) -> None:
    service.make_project("other")
    mine, others = service.token(Scope.READ, project="demo"), service.token(Scope.READ, project="other")
    for what in ("demo", "demo/gpt"):
        assert len(samples(service, what, token=mine)) == 50
    for path in ("/v1/projects/demo/samples", "/v1/projects/demo/runs/gpt/samples"):
        assert service.http(token=others).get(path).json()["code"] == "forbidden"
        assert service.http(token=service.token(Scope.TRAIN)).get(path).json()["code"] == "forbidden"
    assert service.http().get("/v1/projects/none/samples").json()["code"] == "project_not_found"
    assert service.http().get("/v1/projects/demo/runs/none/samples").json()["code"] == "run_not_found"


def test_old_samples_go_in_batches(settings: ServiceSettings, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast_service.samples.controller._FORGOTTEN_AT_ONCE", 10)
    with running_service(settings.model_copy(update={"keep_samples_days": 2})) as service:
        Job(service.http())
        hour = let_the_hour_end(service, clock)
        fill(service, hour - 60 * HOUR, 60)
        report = reconcile(service.context)
        assert report.done == 1
        kept = [since(each) for each in samples(service, "demo", limit=500)]
        assert kept == [since(each) for each in samples(service, "demo/gpt", limit=500)]
        assert min(kept) >= now(service) - timedelta(days=2, minutes=1)
        assert len(kept) == 61 - report.forgotten // 2
        assert report.forgotten > 20
        assert reconcile(service.context).idle


def test_a_clock_that_is_ahead_for_less_than_an_hour_drops_no_samples(settings: ServiceSettings, clock: Clock) -> None:
    with running_service(settings.model_copy(update={"keep_samples_days": 2})) as service:
        Job(service.http())
        fill(service, let_the_hour_end(service, clock) - 9 * HOUR, 10)
        before = counts(service)
        clock.advance(400 * 86400)
        assert reconcile(service.context).forgotten == 0
        assert reconcile(service.context).idle
        clock.advance(-400 * 86400)
        assert reconcile(service.context).idle
        clock.advance(400 * 86400)
        let_the_hour_end(service, clock)
        assert reconcile(service.context).forgotten == sum(before), "it is no jump, but time that went by"


def test_of_more_live_runs_than_can_be_sampled_the_newest_are(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdfast_service.samples.take, "MOST_RUNS", 2)
    Job(service.http(), "demo/bare")
    for name in ("oldest", "older", "newest"):
        trained(service, f"demo/{name}")
        clock.advance(1)
    let_the_hour_end(service, clock)
    reconcile(service.context)
    (of_project,) = samples(service, "demo")
    assert (of_project["live_runs"], of_project["runs_without_restore_point"]) == (4, 1), "all of them are counted"
    left_out = ("goodput", "restore_point_age_seconds")
    assert [of_project[name] for name in left_out] == [None, None], "what is not known of all is not told"
    assert [len(samples(service, f"demo/{name}")) for name in ("oldest", "older", "newest")] == [0, 1, 1]


def test_the_controller_says_what_waits(service: RunningService, clock: Clock) -> None:
    trained(service)
    hour = let_the_hour_end(service, clock)
    with service.context.database.read() as session:
        waits = backlog(session, service.context)
    assert (waits.due, waits.oldest_due_at) == (1, hour + HOUR)
    view = answer(service.http().get(f"/v1/controllers/{NAME}"))
    assert (view["due"], view["lag_seconds"] >= 60) == (1, True)
    reconcile(service.context)
    with service.context.database.read() as session:
        assert backlog(session, service.context).due == 0


def test_the_views_show_no_hour_that_has_not_come(service: RunningService, clock: Clock) -> None:
    """They go by the database's own clock: the one that was ahead is hours behind it then."""
    ahead = 400 * 86400
    clock.advance(-3 * 3600)
    trained(service)
    clock.advance(ahead)
    let_the_hour_end(service, clock)
    reconcile(service.context)
    clock.advance(-ahead)
    hour = last_hour(now(service))
    reconcile(service.context)
    with service.context.database.read() as session:
        for table, view in ((ProjectSampleRow, "project_samples"), (RunSampleRow, "run_samples")):
            assert session.scalar(select(func.count()).select_from(table)) == 2
            assert [row["hour"] for row in read_view(session, view)] == [hour], view


def test_the_views_show_the_same(service: RunningService, clock: Clock) -> None:
    trained(service)
    let_the_hour_end(service, clock)
    reconcile(service.context)
    with service.context.database.read() as session:
        (of_project,), (of_run,) = read_view(session, "project_samples"), read_view(session, "run_samples")
    for row, what, model in ((of_project, "demo", ProjectSample), (of_run, "demo/gpt", RunSample)):
        (shown,) = samples(service, what)
        sample = model.model_validate(shown)
        assert row["hour"] == sample.since
        for name in set(row) & set(model.model_fields):
            assert row[name] == getattr(sample, name), name
    assert of_project["stores"] == {"primary": of_project["stored_bytes"]}


def test_the_command_line_shows_samples_and_gaps(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", service.token(Scope.READ))
    trained(service)
    assert "no samples" in CliRunner().invoke(app, ["projects", "samples", "demo"]).output
    first = let_the_hour_end(service, clock)
    reconcile(service.context)
    let_the_hour_end(service, clock, hours=3)
    reconcile(service.context)
    for words in (["projects", "samples", "demo"], ["runs", "samples", "demo/gpt"]):
        shown = CliRunner().invoke(app, words).stdout.splitlines()
        assert shown[0].startswith("hour (UTC)")
        assert shown[1].startswith(f"{first + 3 * HOUR:%Y-%m-%d %H:00}")
        assert shown[2].startswith("(2 hours missed)")
        assert shown[3].startswith(f"{first:%Y-%m-%d %H:00}")
        path = "demo" if len(words[2].split("/")) == 1 else "demo/gpt"
        assert json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout) == samples(service, path)
        begin = f"{first + HOUR:%Y-%m-%dT%H:00}"
        (day,) = json.loads(CliRunner().invoke(app, [*words, "--every", "day", "--since", begin, "--json"]).stdout)
        assert (day["hours"], day["missed_hours"]) == (1, 2)
        until = [*words, "--until", begin, "--limit", "1", "--json"]
        assert [since(each) for each in json.loads(CliRunner().invoke(app, until).stdout)] == [first]
