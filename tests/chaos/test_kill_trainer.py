"""kill -9 of a rank in the middle of a save: what was not whole is never offered, and the next launch goes on."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from holdfast_client.cli.main import app
from holdfast_protocol.states import CheckpointState
from tests.chaos.conftest import uploading_steps
from tests.support.ranks import launched, read_until

TRAINER = "tests.chaos.trainer"
NOBODY_IS_HELD = (-1, -1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_it_uploads_leaves_no_restorable_checkpoint(client, victim):
    with launched(TRAINER, "tests/killed", victim, 3, world_size=2) as ranks:
        assert "saved 2" in read_until(ranks[victim], "holding")
        ranks[victim].kill()
        ranks[victim].wait()
        assert uploading_steps(client, "killed") == [3]
        assert client.restores.restore_point("tests", "killed").restore_point.step == 2
    # The other rank was killed too, as a launcher does. The same command goes on, and what was cut off is given up.
    with launched(TRAINER, "tests/killed", *NOBODY_IS_HELD, world_size=2) as ranks:
        assert read_until(ranks[0], "saved 3")[0] == "start 3"
        assert read_until(ranks[1], "saved 3")[0] == "start 3"
    states = {(view.step, view.attempt): view.state for view in client.checkpoints.all("tests", "killed")}
    assert states[3, 1] is CheckpointState.ABORTED
    assert states[3, 2] is CheckpointState.COMMITTED


def test_all_ranks_killed_between_two_saves_resume_from_the_last_one(client):
    with launched(TRAINER, "tests/between", *NOBODY_IS_HELD, world_size=2) as ranks:
        for process in ranks:
            read_until(process, "saved 4")
    with launched(TRAINER, "tests/between", *NOBODY_IS_HELD, world_size=2) as ranks:
        [began] = read_until(ranks[0], "start")
    # Not before: the service may carry out a call after its caller was killed, until the next attempt has begun.
    saved = client.checkpoints.all("tests", "between", state=CheckpointState.COMMITTED)
    step = max(view.step for view in saved if view.attempt == 1)
    assert step >= 4
    assert began == f"start {step + 1}"


@pytest.mark.parametrize("service_settings", [{"HOLDFAST_LOST_AFTER_SECONDS": "36000"}])
def test_a_job_killed_before_its_first_heartbeat_has_the_steps_that_its_commit_proves(client):
    """Heartbeats would come once an hour."""

    def told(*command: str):
        return json.loads(CliRunner().invoke(app, [*command, "tests/early", "--json"]).stdout)

    with launched(TRAINER, "tests/early", *NOBODY_IS_HELD) as [job]:
        read_until(job, "saved 20")
        job.kill()
        job.wait()
    with launched(TRAINER, "tests/early", *NOBODY_IS_HELD) as [job]:
        # The service may have carried out a last call of the first one after that was killed.
        committed = int(read_until(job, "start")[-1].split()[1]) - 1
        assert committed >= 20
        read_until(job, f"saved {committed + 1}")
        job.kill()
        job.wait()
    second, first = told("attempts", "list")
    assert first["steps_run"] is second["steps_run"] is None, "no heartbeat has come"
    # The job may have begun one save more in the moment until the signal came.
    assert first["last_step"] in (committed, committed + 1)
    spent = told("runs", "goodput")["attempts"][0]
    assert (spent["last_step"], spent["steps_kept"]) == (first["last_step"], committed)
    assert spent["steps_run"] == first["last_step"]
    assert told("runs", "advise")["run_interruptions"] == 1
    # No attempt has taken the place of the second one: a last call of it may still be carried out.
    while True:
        [shown] = json.loads(CliRunner().invoke(app, ["runs", "list", "tests", "--json"]).stdout)
        before, (second, _) = second, told("attempts", "list")
        if second == before:
            break
    assert shown["last_heard_at"] == second["heartbeat_at"]
    assert shown["last_step"] == second["last_step"]
