"""What becomes of a spooled save that did not get through."""

from __future__ import annotations

import pytest

from holdfast import errors
from holdfast.local.adoption import Verdict, verdict_of
from holdfast_client.errors import (
    CheckpointConflict,
    InvalidRequest,
    LocalReadFailed,
    ManifestConflict,
    QuotaExceeded,
    StoreUnavailable,
    TransferStopped,
    UnexpectedReply,
    from_problem,
)
from holdfast_protocol.problems import Problem
from holdfast_protocol.states import AbortCause, Health
from tests.support.scripted_http import problem


@pytest.mark.rule("late-save-adoption")
@pytest.mark.parametrize(
    "error",
    [
        errors.ServiceUnavailable("unavailable"),
        StoreUnavailable("unavailable"),
        errors.StoreFull("full"),
        errors.StoreRefused("keys"),
        QuotaExceeded("used up"),
        LocalReadFailed("too many open files"),
        UnexpectedReply("a proxy's page"),
        errors.ChunkGone("of another rank"),
        errors.CheckpointAborted("silence", context={"cause": AbortCause.SILENT}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_time_or_an_operator_may_mend_is_tried_again(error):
    assert verdict_of(error) is Verdict.AGAIN


@pytest.mark.parametrize(
    "error",
    [
        ManifestConflict("other content"),
        CheckpointConflict("other world"),
        InvalidRequest("a step of the run's future"),
        errors.ChunkCorrupt("0" * 64, "missing", "rotten here"),
        errors.CheckpointAborted("rank 1 failed", context={"cause": AbortCause.RANK_FAILED}),
        errors.CheckpointAborted("by a person", context={"cause": AbortCause.JOB}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_can_never_be_committed_makes_room(error):
    assert verdict_of(error) is Verdict.DROP


@pytest.mark.rule("late-save-adoption")
@pytest.mark.parametrize("status", [400, 404, 409, 410, 412, 413, 422, 451, 500])
def test_a_refusal_that_only_a_newer_client_knows_drops_no_save(status):
    refused = from_problem(Problem.model_validate_json(problem("not_yet_invented", status=status).body))
    assert verdict_of(refused) is not Verdict.DROP


@pytest.mark.rule("late-save-adoption")
@pytest.mark.parametrize(
    "error",
    [
        errors.StaleAttempt("fenced"),
        errors.Unauthenticated("expired"),
        TransferStopped("the job ends"),
        ValueError(),
        errors.CheckpointAborted("fenced by attempt 2", context={"cause": AbortCause.FENCED}),
        errors.CheckpointAborted("its attempt has ended", context={"cause": "attempt_ended"}),
        errors.CheckpointAborted("by a service that tells no cause"),
        CheckpointConflict("committed, and found corrupt since", context={"health": Health.CORRUPT}),
    ],
    ids=lambda error: f"{type(error).__name__} {getattr(error, 'context', {}).get('cause', '')}".strip(),
)
def test_what_only_this_job_cannot_do_is_left_for_the_next(error):
    assert verdict_of(error) is Verdict.LEAVE
