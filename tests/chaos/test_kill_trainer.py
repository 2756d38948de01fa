"""kill -9 of a rank in the middle of a save: what was not whole is never offered, and the next launch goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast_protocol.states import CheckpointState
from tests.chaos.conftest import uploading_steps
from tests.support.ports import free_ports

ROOT = Path(__file__).parents[2]


@contextmanager
def launched(run, *, hold_rank, hold_step, world_size=2):
    port = free_ports()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.trainer", run, str(hold_rank), str(hold_step)],
            env=os.environ
            | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
            },
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stdout.close()


def read_until(process, word):
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith(word):
            return lines
    raise AssertionError(f"the rank ended before it said {word!r}: {lines}")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_it_uploads_leaves_no_restorable_checkpoint(client, victim):
    with launched("tests/killed", hold_rank=victim, hold_step=3) as ranks:
        assert "saved 2" in read_until(ranks[victim], "holding")
        ranks[victim].kill()
        ranks[victim].wait()
        assert uploading_steps(client, "killed") == [3]
        assert client.restore_point("tests", "killed").restore_point.step == 2
    # The other rank was killed too, as a launcher does. The same command goes on, and what was cut off is given up.
    with launched("tests/killed", hold_rank=-1, hold_step=-1) as ranks:
        assert read_until(ranks[0], "saved 3")[0] == "start 3"
        assert read_until(ranks[1], "saved 3")[0] == "start 3"
    states = {(view.step, view.attempt): view.state for view in client.all_checkpoints("tests", "killed")}
    assert states[3, 1] is CheckpointState.ABORTED
    assert states[3, 2] is CheckpointState.COMMITTED


def test_all_ranks_killed_between_two_saves_resume_from_the_last_one(client):
    with launched("tests/between", hold_rank=-1, hold_step=-1) as ranks:
        for process in ranks:
            read_until(process, "saved 4")
    step = client.restore_point("tests", "between").restore_point.step
    assert step >= 4
    with launched("tests/between", hold_rank=-1, hold_step=-1) as ranks:
        assert read_until(ranks[0], "start") == [f"start {step + 1}"]
