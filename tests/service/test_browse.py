"""Looking: projects, runs, lists with filters and cursors, selectors, manifests, edits, the service itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import pytest

from holdfast_protocol.base import PROTOCOL_VERSION
from holdfast_protocol.digests import shard_digest
from holdfast_protocol.states import Scope
from holdfast_protocol.stores import FindingKind
from tests.support.rank import Job, Refused, answer, digest_of
from tests.support.rebuilt import check_all, rebuilt_service, record_all
from tests.support.retention import plan, prune, put_policy
from tests.support.service import RunningService


@pytest.fixture
def http(service: RunningService) -> httpx.Client:
    return service.http()


def pages(http: httpx.Client, path: str, **params: Any) -> list[Any]:
    """All items of a list, page by page."""
    items: list[Any] = []
    while True:
        page = answer(http.get(path, params=params))
        items += page["items"]
        if page["next_cursor"] is None:
            return items
        params["cursor"] = page["next_cursor"]


def test_a_project_shows_its_quota_its_bytes_and_its_runs(http: httpx.Client) -> None:
    made = answer(http.put("/v1/projects/demo", json={"quota_bytes": 1000}))
    assert (made["quota_bytes"], made["stored_bytes"], made["runs"]) == (1000, 0, 0)
    Job(http).save(100, content=b"x" * 100)
    shown = answer(http.get("/v1/projects/demo"))
    assert (shown["id"], shown["stored_bytes"], shown["runs"]) == (made["id"], 206, 1)
    assert answer(http.put("/v1/projects/demo", json={}))["quota_bytes"] == 1000
    for name in ("a", "b", "c"):
        answer(http.put(f"/v1/projects/{name}", json={}))
    assert [project["name"] for project in pages(http, "/v1/projects", limit=2)] == ["a", "b", "c", "demo"]


@pytest.mark.parametrize("name", ["..", "a b", "-a", "a" * 101, "ä"])
def test_a_project_or_a_run_has_a_plain_name(http: httpx.Client, name: str) -> None:
    assert http.put(f"/v1/projects/{name}", json={}).status_code in (404, 422)
    answer(http.put("/v1/projects/demo", json={}))
    assert http.put(f"/v1/projects/demo/runs/{name}").status_code in (404, 405, 422)


def test_runs_are_listed_newest_first_with_their_restore_point(http: httpx.Client) -> None:
    answer(http.put("/v1/projects/demo", json={}))
    for name in ("first", "second", "third"):
        made = answer(http.put(f"/v1/projects/demo/runs/{name}"))
        assert answer(http.put(f"/v1/projects/demo/runs/{name}")) == made
    job = Job(http, "demo/second")
    job.save(100)
    saved = job.save(200)
    job.begin(300)
    runs = pages(http, "/v1/projects/demo/runs", limit=2)
    assert [run["name"] for run in runs] == ["third", "second", "first"]
    shown = answer(http.get("/v1/projects/demo/runs/second"))
    # Adding up a run's stored bytes looks at each of its chunks: too much for a list.
    assert shown["stored_bytes"] > 0
    assert runs[1] == shown | {"stored_bytes": None}
    assert (shown["latest_attempt"], shown["committed_checkpoints"], shown["newest_step"]) == (1, 2, 200)
    assert shown["restore_point"]["checkpoint_id"] == saved["id"]
    assert runs[0]["restore_point"] is None


def test_runs_of_all_projects_are_one_list(http: httpx.Client, service: RunningService) -> None:
    jobs = {name: Job(http, name, create=True) for name in ("demo/a", "other/b", "demo/c", "other/d")}
    for name in ("demo/c", "other/b"):
        jobs[name].end("failed")
    jobs["other/d"].end("finished")
    listed = [f"{run['project']}/{run['name']}" for run in pages(http, "/v1/runs", limit=1)]
    assert listed == ["other/d", "demo/c", "other/b", "demo/a"]
    failed = pages(http, "/v1/runs", status=["failed", "lost"], limit=1)
    assert [(run["project"], run["name"]) for run in failed] == [("demo", "c"), ("other", "b")]
    assert failed[0] == answer(http.get("/v1/projects/demo/runs", params={"status": "failed"}))["items"][0]
    # A project's token sees its own alone.
    own = service.http(token=service.token(Scope.READ, project="other"))
    assert [run["name"] for run in pages(own, "/v1/runs")] == ["d", "b"]
    answer(http.request("DELETE", "/v1/projects/other/runs/d", json={}, headers={"If-Match": "*"}))
    assert [run["name"] for run in pages(own, "/v1/runs")] == ["b"]
    assert [run["name"] for run in pages(own, "/v1/runs", deleted=True)] == ["d"]


@pytest.fixture
def job(http: httpx.Client) -> Job:
    """Steps 100 to 500: 200 was aborted, 300 has a label, 400 diverged, 500 is uploading."""
    job = Job(http)
    job.save(100)
    job.begin(200).abort()
    save = job.begin(300, labels=["milestone", "eval/best"])
    save.write(0, [b"three hundred", b"index"], metrics={"loss": {"value": 0.25}})
    job.save(400, metrics={"loss": {"nonfinite": "nan"}})
    job.begin(500)
    return job


@pytest.mark.parametrize(
    ("filters", "steps"),
    [
        ({}, [500, 400, 300, 200, 100]),
        ({"state": "committed"}, [400, 300, 100]),
        ({"state": ["aborted", "uploading"]}, [500, 200]),
        ({"health": "diverged"}, [400]),
        ({"min_step": 200, "max_step": 400}, [400, 300, 200]),
        ({"label": "milestone"}, [300]),
        ({"label": "mile"}, []),
        ({"attempt": 1, "state": "committed", "health": "ok"}, [300, 100]),
        ({"attempt": 2}, []),
        ({"committed_since": "2000-01-01T00:00:00Z"}, [400, 300, 100]),
        ({"committed_since": "2999-01-01T00:00:00Z"}, []),
        ({"committed_before": "2000-01-01T00:00:00Z"}, []),
    ],
)
def test_checkpoints_are_filtered(job: Job, filters: dict[str, Any], steps: list[int]) -> None:
    path = f"{job.base}/checkpoints"
    assert [each["step"] for each in pages(job.http, path, **filters)] == steps
    assert [each["step"] for each in pages(job.http, path, **filters, limit=1)] == steps


def test_checkpoints_of_all_runs_are_one_list(job: Job, service: RunningService) -> None:
    http = job.http
    for name in ("demo/bert", "other/vit"):
        another = Job(http, name, create=True)
        another.save(100)
        another.save(400, metrics={"loss": {"nonfinite": "nan"}})

    def named(of: httpx.Client, path: str, **wanted: Any) -> list[tuple[str, int]]:
        found = pages(of, path, **wanted)
        assert pages(of, path, **wanted, limit=1) == found
        return [(f"{each['project']}/{each['run']}", each["step"]) for each in found]

    route = "/v1/projects/demo/checkpoints"
    diverged = [("demo/bert", 400), ("demo/gpt", 400)]
    assert sorted(named(http, route, health="diverged")) == diverged
    assert sorted(named(http, "/v1/checkpoints", health="diverged")) == [*diverged, ("other/vit", 400)]
    all_of_demo = named(http, route)
    # Those of one run stand together, the largest step first; a run's own list is a part of it.
    assert [step for run, step in all_of_demo if run == "demo/gpt"] == [500, 400, 300, 200, 100]
    assert len({run for run, _ in all_of_demo}) == sum(
        before != now for before, now in pairwise([None, *(run for run, _ in all_of_demo)])
    )
    own_list = pages(http, f"{job.base}/checkpoints", state="committed")
    assert [each for each in pages(http, route, state="committed") if each["run"] == "gpt"] == own_list
    prune(service, checkpoint_ids=[own_list[0]["id"]], dry_run=False)
    assert named(http, route, state=["trashed", "deleting"]) == [("demo/gpt", 400)]
    assert named(http, "/v1/checkpoints", state="trashed", health="diverged") == [("demo/gpt", 400)]
    assert named(http, "/v1/checkpoints", state="trashed", health="corrupt") == []
    assert named(http, route, label="milestone", max_step=300) == [("demo/gpt", 300)]
    own = service.http(token=service.token(Scope.READ, project="other"))
    assert named(own, "/v1/checkpoints", state="committed") == [("other/vit", 400), ("other/vit", 100)]
    assert own.get(route).status_code == 403
    assert http.get("/v1/projects/none/checkpoints").json()["code"] == "project_not_found"
    assert http.get(route, params={"cursor": "WyJydW5zIiwxLDJd"}).json()["code"] == "invalid_request"


def test_checkpoints_are_filtered_by_when_they_were_committed(job: Job) -> None:
    path = f"{job.base}/checkpoints"
    middle = next(each["committed_at"] for each in pages(job.http, path) if each["step"] == 300)
    assert [each["step"] for each in pages(job.http, path, committed_since=middle)] == [400, 300]
    assert [each["step"] for each in pages(job.http, path, committed_before=middle)] == [100]


def test_a_cursor_holds_its_place_while_others_write(job: Job) -> None:
    path = f"{job.base}/checkpoints"
    first = answer(job.http.get(path, params={"limit": 2}))
    job.save(600)
    second = answer(job.http.get(path, params={"limit": 10, "cursor": first["next_cursor"]}))
    assert [each["step"] for each in first["items"] + second["items"]] == [500, 400, 300, 200, 100]


@pytest.mark.parametrize("cursor", ["", "x", "AAAA", "WyJydW5zIiwxLDJd", "W10", "bnVsbA"])
def test_a_cursor_that_is_not_one_of_this_list_is_refused(job: Job, cursor: str) -> None:
    with pytest.raises(Refused) as refused:
        answer(job.http.get(f"{job.base}/checkpoints", params={"cursor": cursor}))
    assert refused.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("selector", "step"), [("latest", 300), ("100", 100), ("200", 200), ("400%231", 400), ("best:loss", 300)]
)
def test_a_selector_shows_its_checkpoint_whatever_became_of_it(job: Job, selector: str, step: int) -> None:
    view = answer(job.http.get(f"{job.base}/checkpoints/{selector}"))
    assert view["step"] == step
    assert answer(job.http.get(f"{job.base}/checkpoints/{view['id']}")) == view


@pytest.mark.parametrize(
    ("selector", "code"),
    [
        ("700", "checkpoint_not_found"),
        ("100%232", "checkpoint_not_found"),
        (f"ck_{'0' * 32}", "checkpoint_not_found"),
        ("best:accuracy", "no_restore_point"),
        ("newest", "invalid_request"),
    ],
)
def test_a_selector_that_means_nothing_says_so(job: Job, selector: str, code: str) -> None:
    with pytest.raises(Refused) as refused:
        answer(job.http.get(f"{job.base}/checkpoints/{selector}"))
    assert refused.value.code == code


def test_another_runs_checkpoint_is_not_selected_by_its_id(http: httpx.Client) -> None:
    other = Job(http, "demo/other").save(100)
    job = Job(http, "demo/gpt", create=True)
    with pytest.raises(Refused) as refused:
        answer(http.get(f"{job.base}/checkpoints/{other['id']}"))
    assert refused.value.code == "checkpoint_not_found"


@pytest.mark.rule("finite-metrics")
def test_metrics_that_are_not_finite_come_back_as_valid_json_and_are_never_best(http: httpx.Client) -> None:
    job = Job(http)
    losses = {100: {"value": 0.5}, 200: {"nonfinite": "nan"}, 300: {"nonfinite": "-inf"}, 400: {"value": 0.75}}
    for step, loss in losses.items():
        job.save(step, metrics={"loss": loss})
    reply = http.get(f"{job.base}/checkpoints")
    assert "NaN" not in reply.text
    assert "Infinity" not in reply.text
    shown = {each["step"]: each["metrics"]["loss"] for each in reply.json()["items"]}
    assert shown[200] == {"value": None, "nonfinite": "nan"}
    assert shown[300] == {"value": None, "nonfinite": "-inf"}
    best = answer(http.get(f"{job.base}/restore-point", params={"selector": "best:loss:min"}))
    assert best["restore_point"]["step"] == 100
    best = answer(http.get(f"{job.base}/restore-point", params={"selector": "best:loss:max"}))
    assert best["restore_point"]["step"] == 400


@pytest.mark.rule("finite-metrics")
@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_json_does_not_have_is_refused_with_valid_json(http: httpx.Client, token: str) -> None:
    save = Job(http).begin(100)
    body = '{"epoch": 1, "attempt": 1, "outcome": "sealed", "metrics": {"loss": {"value": TOKEN}}}'.replace(
        "TOKEN", token
    )
    headers = {"Content-Type": "application/json"}
    reply = http.put(f"/v1/checkpoints/{save.id}/shards/0", content=body, headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")
    assert "NaN" not in reply.text
    assert "Infinity" not in reply.text


def test_a_manifest_tells_what_a_checkpoint_consists_of(http: httpx.Client) -> None:
    job = Job(http, world_size=2)
    save = job.begin(100)
    chunks = {0: [b"layout", b"weights 0", b"index 0"], 1: [b"weights 1", b"index 1"]}
    for rank, contents in chunks.items():
        view = save.write(rank, contents)
    manifest = answer(http.get(f"/v1/checkpoints/{save.id}/manifest"))
    assert manifest["checkpoint"] == view
    assert manifest["layout_digest"] == digest_of(b"layout")
    assert [shard["rank"] for shard in manifest["shards"]] == [0, 1]
    for shard, contents in zip(manifest["shards"], chunks.values(), strict=True):
        assert shard["index_digest"] == digest_of(contents[-1])
        assert shard["chunk_count"] == len(contents)
        listed = answer(http.get(f"/v1/checkpoints/{save.id}/shards/{shard['rank']}"))
        assert listed["chunks"] == [{"digest": digest_of(each), "bytes": len(each)} for each in contents]
        assert listed["digest"] == shard["digest"] == shard_digest([digest_of(each) for each in contents])
    assert http.get(f"/v1/checkpoints/{save.id}/shards/2").json()["code"] == "invalid_request"


@pytest.mark.parametrize(("step", "code"), [(500, "incomplete_checkpoint"), (200, "checkpoint_aborted")])
def test_what_is_not_whole_has_no_manifest(job: Job, step: int, code: str) -> None:
    view = answer(job.http.get(f"{job.base}/checkpoints/{step}"))
    for path in ("manifest", "shards/0"):
        assert job.http.get(f"/v1/checkpoints/{view['id']}/{path}").json()["code"] == code


def test_an_edit_needs_the_version_that_was_seen(http: httpx.Client) -> None:
    saved = Job(http).save(100)
    path = f"/v1/checkpoints/{saved['id']}"
    first = http.patch(path, json={"labels": ["b", "a", "b"]}, headers={"If-Match": saved["etag"]})
    assert answer(first)["labels"] == ["a", "b"]
    assert first.headers["ETag"] == first.json()["etag"] != saved["etag"]
    again = http.patch(path, json={"labels": ["b", "a"]}, headers={"If-Match": saved["etag"]})
    assert again.json()["etag"] == first.json()["etag"], "the reply was lost"
    late = http.patch(path, json={"labels": []}, headers={"If-Match": saved["etag"]})
    assert (late.status_code, late.json()["code"]) == (412, "edit_conflict")
    unseen = http.patch(path, json={"labels": []})
    assert (unseen.status_code, unseen.json()["code"]) == (428, "edit_needs_version")
    assert answer(http.get(path))["labels"] == ["a", "b"]


def test_a_person_can_put_a_checkpoint_into_quarantine_and_take_it_out(http: httpx.Client) -> None:
    job = Job(http)
    older, newer = job.save(100), job.save(200)
    path = f"/v1/checkpoints/{newer['id']}"

    def edit(**body: Any) -> Any:
        return answer(http.patch(path, json=body, headers={"If-Match": "*"}))

    with pytest.raises(Refused):
        edit(health="quarantined")
    with pytest.raises(Refused):
        edit(health="corrupt", health_reason="only the service says so")
    assert edit(health="quarantined", health_reason="loss spike")["health_reason"] == "loss spike"
    decision = answer(http.get(f"{job.base}/restore-point"))
    assert decision["restore_point"]["checkpoint_id"] == older["id"]
    assert (decision["skipped"][0]["reason"], decision["ever_committed"]) == ("quarantined", True)
    assert edit(health="ok")["health_reason"] is None
    assert answer(http.get(f"{job.base}/restore-point"))["restore_point"]["checkpoint_id"] == newer["id"]


def test_a_metric_that_was_measured_later_counts_like_one_of_the_save(
    http: httpx.Client, service: RunningService, empty_url: str
) -> None:
    job = Job(http)
    saved = [job.save(step, metrics={"loss": {"value": 1000 / step}}) for step in (100, 200, 300)]
    record_all(service.context)

    def edit(view: dict[str, Any], **metrics: Any) -> Any:
        path, seen = f"/v1/checkpoints/{view['id']}", {"If-Match": view["etag"]}
        return answer(http.patch(path, json={"metrics": metrics}, headers=seen))

    scores = [0.7, 0.9, 0.8]
    scored = [edit(view, accuracy={"value": score}, bleu=None) for view, score in zip(saved, scores, strict=True)]
    assert scored[1]["metrics"] == {
        "loss": {"value": 5.0, "nonfinite": None},
        "accuracy": {"value": 0.9, "nonfinite": None},
    }
    assert edit(saved[1], accuracy={"value": 0.9})["etag"] == scored[1]["etag"], "the reply was lost"
    with pytest.raises(Refused, match="edit_conflict"):
        edit(saved[1], accuracy={"value": 0.1})
    best = f"{job.base}/checkpoints/best:accuracy:max"
    assert answer(http.get(best))["step"] == 200
    put_policy(service, keep_last=1, keep_best={"metric": "accuracy", "mode": "max"})
    kept = {each["step"]: each["keep"] for each in plan(service)["checkpoints"]}
    assert kept[200]
    (told,) = answer(http.get("/v1/audit-events", params={"checkpoint": saved[1]["id"]}))["items"]
    assert told["before"] == {"metrics": {"accuracy": None, "bleu": None}}
    assert told["after"] == {"metrics": {"accuracy": {"value": 0.9, "nonfinite": None}, "bleu": None}}
    for _ in range(2):  # the record of the save, and then that of the edit
        assert FindingKind.DIFFERENT_RECORDS not in {
            each.kind for each in check_all(service.context).stores[0].findings
        }
        record_all(service.context)
    with rebuilt_service(service.context.settings, empty_url) as (rebuilt, _):
        assert answer(rebuilt.http().get(f"/v1/checkpoints/{saved[1]['id']}"))["metrics"] == scored[1]["metrics"]
    edit(scored[1], accuracy=None)
    assert answer(http.get(best))["step"] == 300
    with pytest.raises(Refused, match="only a committed checkpoint has metrics to edit"):
        edit(job.begin(400).now(), accuracy={"value": 1})
    full = saved[0] | {"etag": "*"}
    for part in range(9):
        edit(full, **{f"m{part}-{each}": {"value": 1} for each in range(100)})
    with pytest.raises(Refused, match="at most 1000 metrics"):
        edit(full, **{f"more-{each}": {"value": 1} for each in range(100)})


def test_no_edit_makes_a_corrupt_or_an_unfinished_checkpoint_ok(http: httpx.Client, service: RunningService) -> None:
    from holdfast_service.db.tables.core import Checkpoint

    job = Job(http)
    saved, uploading = job.save(100), job.begin(200)
    with service.context.database.transaction() as session:
        session.get_one(Checkpoint, saved["id"]).health = "corrupt"
    for checkpoint_id in (saved["id"], uploading.id):
        with pytest.raises(Refused) as refused:
            answer(http.patch(f"/v1/checkpoints/{checkpoint_id}", json={"health": "ok"}, headers={"If-Match": "*"}))
        assert refused.value.code == "checkpoint_conflict"


def test_the_restore_point_can_be_asked_for_below_a_step(http: httpx.Client) -> None:
    job = Job(http)
    for step in (100, 200, 300):
        job.save(step)

    def ask(**params: Any) -> Any:
        return answer(http.get(f"{job.base}/restore-point", params=params))

    assert ask(before_step=300)["restore_point"]["step"] == 200
    nothing = {"restore_point": None, "skipped": [], "ever_committed": True, "note": "", "saved_with": None}
    assert ask(before_step=100) == nothing
    assert ask(selector="200")["restore_point"]["step"] == 200
    with pytest.raises(Refused) as refused:
        ask(selector="250")
    assert refused.value.code == "checkpoint_not_found"


def test_the_service_says_what_it_is_and_what_the_token_may_do(http: httpx.Client, service: RunningService) -> None:
    info = answer(http.get("/v1/service"))
    assert (info["protocol"], info["store_kind"], info["store_asks_md5"]) == (PROTOCOL_VERSION, "posix", False)
    assert (info["catalog_id"], info["epoch"]) == (service.context.catalog_id, 1)
    assert info["token_scopes"] == ["admin", "metrics", "operate", "read", "train"]
