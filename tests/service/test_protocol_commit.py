"""Begin, seal, commit: rule one-checkpoint-per-step to 8 and 10, over HTTP on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from holdfast_service.db.tables.core import Copy
from tests.support.interleave import refused
from tests.support.rank import Job, digest_of
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


def test_a_chunk_that_two_ranks_share_is_stored_and_counted_once(job: Job) -> None:
    save = job.begin(100)
    save.write(0, [b"frozen base", b"index 0"])
    assert [each["status"] for each in save.negotiate(1, [b"frozen base", b"index 1"])["chunks"]] == [
        "present",
        "upload",
    ]
    view = save.write(1, [b"frozen base", b"index 1"])
    assert (view["state"], view["logical_bytes"], view["chunk_bytes"], view["uploaded_bytes"]) == (
        "committed", 36, 25, 25
    )  # fmt: skip


def test_the_next_step_sends_only_what_changed(job: Job) -> None:
    job.save(100, content=b"the same weights")
    assert job.save(200, content=b"the same weights")["uploaded_bytes"] == 0


@pytest.mark.rule("one-checkpoint-per-step")
def test_a_second_begin_finds_the_first_and_cannot_change_the_world(job: Job) -> None:
    save = job.begin(100)
    assert job.begin(100).id == save.id
    with refused("checkpoint_conflict"):
        job.begin(100, world_size=4)
    with refused("checkpoint_conflict"):
        job.begin(100, kind="emergency")


@pytest.mark.rule("one-checkpoint-per-step")
def test_a_committed_step_is_given_back_and_never_begun_twice(job: Job) -> None:
    view = job.save(100)
    again = job.begin(100)
    assert (again.id, again.view["state"]) == (view["id"], "committed")
    with refused("shard_sealed"):
        again.negotiate(0, [b"other content"])


@pytest.mark.rule("one-checkpoint-per-step")
def test_after_an_abort_the_same_step_is_begun_anew(job: Job) -> None:
    save = job.begin(100)
    save.abort("disk full")
    with refused("checkpoint_aborted") as caught:
        save.negotiate(0, [b"late"])
    assert "disk full" in caught.value.detail
    assert job.begin(100).id != save.id
    assert job.save(100)["state"] == "committed"
    assert save.now()["state"] == "aborted"


@pytest.mark.rule("metrics-from-rank-0")
def test_metrics_come_from_rank_0_and_are_merged_with_components(job: Job) -> None:
    save = job.begin(100)
    with refused("invalid_request"):
        save.write(1, [b"w1", b"i1"], metrics={"loss": {"value": 9.0}})
    save.seal(1, [b"w1", b"i1"], components={"rng": {"kind": "rng", "logical_bytes": 7}})
    view = save.write(
        0,
        [b"w0", b"i0"],
        metrics={"loss": {"value": 0.25}},
        components={"rng": {"kind": "rng", "logical_bytes": 5}, "model": {"kind": "model", "logical_bytes": 3}},
    )
    assert view["metrics"] == {"loss": {"value": 0.25, "nonfinite": None}}
    assert {name: each["logical_bytes"] for name, each in view["components"].items()} == {"model": 3, "rng": 12}


def test_config_and_tokenizer_are_declared_to_no_trainer(job: Job, service: RunningService) -> None:
    """One from before they were kept raises for each component that it lacks."""
    model = {"model": {"kind": "model", "logical_bytes": 3}}
    first = job.save(100, components={**model, "hf_files": {"kind": "extra", "logical_bytes": 5}})
    assert first["components"].keys() == {"hf_files", "model"}
    later = Job(service.http(), after=1, world_size=2)
    assert later.opened["components"] == ["model"]
    assert later.save(200, components=model)["missing_components"] == []


@pytest.mark.rule("metrics-from-rank-0")
def test_one_rank_that_is_not_finite_marks_the_whole_checkpoint(job: Job) -> None:
    save = job.begin(100)
    save.write(0, [b"w0", b"i0"])
    view = save.write(1, [b"w1", b"i1"], finite=False)
    assert (view["state"], view["health"]) == ("committed", "diverged")
    assert view["health_reason"] == "NaN or infinity in the state of rank 1"


@pytest.mark.rule("metrics-from-rank-0")
def test_a_metric_that_is_nan_is_kept_as_valid_json_and_marks_the_checkpoint(job: Job) -> None:
    save = job.begin(100)
    save.write(1, [b"w1", b"i1"])
    view = save.write(0, [b"w0", b"i0"], metrics={"loss": {"nonfinite": "nan"}, "lr": {"value": 0.1}})
    assert (view["health"], view["health_reason"]) == ("diverged", "the metric loss is nan")
    assert view["metrics"]["loss"] == {"value": None, "nonfinite": "nan"}


@pytest.mark.rule("no-failure-after-seal")
def test_a_failed_rank_aborts_at_once_and_is_named(job: Job) -> None:
    save = job.begin(100)
    view = save.fail(1, "CUDA out of memory, GET https://store/x?sig=s3cret")
    assert (view["state"], view["abort_rank"]) == ("aborted", 1)
    assert view["abort_reason"] == "rank 1 failed: CUDA out of memory, GET https://store/x?***"
    assert view["abort_cause"] == "rank_failed"
    assert save.fail(1, "again")["abort_reason"] == view["abort_reason"]
    with refused("checkpoint_aborted"):
        save.negotiate(0, [b"w0"])


@pytest.mark.rule("no-failure-after-seal")
def test_a_rank_that_lost_the_reply_to_its_seal_cannot_abort_a_good_checkpoint(job: Job) -> None:
    save = job.begin(100)
    save.write(0, [b"w0", b"i0"])
    with refused("shard_sealed"):
        save.fail(0, "the reply to my seal was lost")
    assert save.now()["state"] == "uploading"
    assert save.write(1, [b"w1", b"i1"])["state"] == "committed"
    with refused("shard_sealed"):
        save.fail(1, "the reply to my seal was lost")
    assert save.now()["state"] == "committed"


@pytest.mark.rule("no-failure-after-seal")
def test_a_seal_is_repeated_with_the_same_content_and_refused_with_another(job: Job) -> None:
    save = job.begin(100)
    first = save.write(0, [b"w0", b"i0"])
    assert save.seal(0, [b"w0", b"i0"]) == first
    for changes in ({"logical_bytes": 1}, {"finite": False}, {"metrics": {"loss": {"value": 1.0}}}):
        with refused("manifest_conflict"):
            save.seal(0, [b"w0", b"i0"], **changes)
    with refused("manifest_conflict"):
        save.seal(0, [b"i0"], index={"shard": 0, "layout": 0})
    save.write(1, [b"w1", b"i1"])
    assert save.seal(0, [b"w0", b"i0"])["state"] == "committed"
    with refused("manifest_conflict"):
        save.seal(1, [b"i1"], index={"shard": 0})


@pytest.mark.rule("seal-only-negotiated")
def test_a_chunk_that_was_not_negotiated_under_this_shard_cannot_be_sealed(job: Job) -> None:
    save = job.begin(100)
    save.upload(1, [b"shared", b"i"])
    with refused("chunk_not_negotiated") as caught:
        save.seal(0, [b"shared", b"i"])  # rank 1's reference does not hold it for rank 0
    assert set(caught.value.context["digests"]) == {digest_of(b"shared"), digest_of(b"i")}


@pytest.mark.rule("seal-only-negotiated")
def test_a_seal_is_checked_against_itself(job: Job) -> None:
    save = job.begin(100)
    save.upload(0, [b"w0", b"i0"])
    for changes in (
        {"digest": "0" * 64},
        {"index": {"shard": 2, "layout": 0}},
        {"index": {"shard": 1, "layout": 2}},
        {"index": {"shard": 1}},
        {"chunks": []},
    ):
        with refused("invalid_request"):
            save.seal(0, [b"w0", b"i0"], **changes)
    with refused("invalid_request"):
        save.seal(2, [b"w0", b"i0"])


@pytest.mark.rule("seal-only-negotiated")
def test_the_client_is_not_believed_that_it_has_sent_a_chunk(job: Job) -> None:
    save = job.begin(100)
    answers = save.negotiate(0, [b"sent", b"never sent"])["chunks"]
    save.send([b"sent", b"never sent"], [each for each in answers if each["digest"] == digest_of(b"sent")])
    with refused("incomplete_checkpoint") as caught:
        save.seal(0, [b"sent", b"never sent"])
    assert caught.value.context["digests"] == [digest_of(b"never sent")]
    save.write(0, [b"sent", b"never sent"])
    assert save.now()["sealed_ranks"] == 1


@pytest.mark.rule("seal-only-negotiated")
def test_what_nobody_reported_as_finished_is_verified_at_the_seal(job: Job) -> None:
    save = job.begin(100)
    save.send([b"w0", b"i0"], save.negotiate(0, [b"w0", b"i0"])["chunks"])
    assert save.seal(0, [b"w0", b"i0"])["sealed_ranks"] == 1


@pytest.mark.rule("seal-only-negotiated")
def test_a_copy_that_went_bad_after_its_seal_stops_the_commit_and_is_named(job: Job, service: RunningService) -> None:
    save = job.begin(100)
    save.write(0, [b"w0", b"i0"])
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.stored_digest == digest_of(b"w0")).values(state="bad"))
    save.upload(1, [b"w1", b"i1"])
    with refused("chunk_gone") as caught:
        save.seal(1, [b"w1", b"i1"])
    assert (caught.value.context["rank"], caught.value.context["digests"]) == (0, [digest_of(b"w0")])
    view = save.now()
    assert (view["state"], view["abort_cause"]) == ("aborted", "chunk_gone")
    assert digest_of(b"w0") in view["abort_reason"]
    # The step can be saved again: the lost chunk is sent anew.
    again = job.begin(100)
    assert again.upload(0, [b"w0", b"i0"])["chunks"][0]["status"] == "upload"
