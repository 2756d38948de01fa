"""kill -9 to ranks and to the agent of their node, at chosen and at random moments: what save() returned for is
committed while one of the two lives, and is never wrong.

HOLDFAST_KILL_ROUNDS says how many random moments (make has few; a night can have thousands).
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from tests.support.handing_rank import digest_of, state_of
from tests.support.node_agent import agent_serve
from tests.support.ports import free_ports
from tests.support.ranks import ROOT, launched, rank_environment, read_until
from tests.support.serve import HOLDFAST
from tests.support.training import Job

import holdfast
from holdfast_client.agent.link import status_of
from holdfast_client.agent.process import serves_at
from holdfast_client.cli.output import ExitCode
from holdfast_protocol.states import AttemptOutcome, CheckpointState

RANK = "tests.support.handing_rank"
MIB = 1024**2
ROUNDS = int(os.environ.get("HOLDFAST_KILL_ROUNDS", "2"))
CASES = [*itertools.product((2, 4), ("one rank", "all ranks", "agent", "all"))]
"""World size, and who is killed."""


@pytest.fixture
def agent(tmp_path, monkeypatch):
    with agent_serve(tmp_path / "agent.log") as served:
        monkeypatch.setenv("HOLDFAST_AGENT", str(served.socket))
        yield served


def restored(run, size=8 * MIB):
    """The next step, and the digest of the state, as a launch that knows the agent finds them."""
    state = state_of(-1, size)
    with holdfast.Checkpointer(run) as ckpt:
        return ckpt.restore(state), digest_of(state)


def digest_at(step, size=8 * MIB):
    return digest_of(state_of(step, size))


def say(rank):
    rank.stdin.write("go on\n")
    rank.stdin.flush()


def wait_until(holds):
    until = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def wait_for_end(ranks):
    for rank in ranks:
        rank.wait(timeout=90)


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_that_are_killed_as_soon_as_save_has_returned_have_saved(run, agent, world_size):
    with launched(RANK, run, 1, "killed", 8 * MIB, world_size=world_size) as ranks:
        wait_for_end(ranks)
    assert restored(run) == (1, digest_at(0))
    wait_until(lambda: agent.log.count("committed for a rank that is gone") == world_size)


def test_the_next_launch_waits_for_what_a_killed_one_has_left_to_the_agent(run, agent, monkeypatch):
    with launched(RANK, run, 1, "waits", MIB // 2) as [rank]:
        read_until(rank, "closed")
    # Slow: the next launch would otherwise fence a save that is on its way.
    monkeypatch.setenv("HOLDFAST_MAX_BYTES_PER_SECOND", "131072")
    with launched(RANK, run, 1, "killed", MIB // 2) as [rank]:
        wait_for_end([rank])
    monkeypatch.delenv("HOLDFAST_MAX_BYTES_PER_SECOND")
    assert restored(run, MIB // 2) == (2, digest_at(1, MIB // 2))


def test_one_of_two_ranks_is_killed_and_the_other_ones_save_commits(run, agent):
    with launched(RANK, run, 1, "stays", 8 * MIB, world_size=2) as ranks:
        for rank in ranks:
            read_until(rank, "saved 0")
        ranks[1].kill()
        ranks[1].wait(timeout=90)
        state = state_of(-1, 8 * MIB)
        ranks[0].kill()
        ranks[0].wait(timeout=90)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(state) == 1
    assert digest_of(state) == digest_at(0)


def test_when_both_are_killed_the_point_before_is_there(run, service, agent):
    with launched(RANK, run, 2, "told", MIB) as [rank]:
        say(rank)
        read_until(rank, "saved 0")
        wait_until(lambda: service.client.restores.restore_point(*run.split("/")).restore_point is not None)
        service.served.process.signal(signal.SIGSTOP)  # nothing can be committed before both are killed
        try:
            say(rank)
            read_until(rank, "saved 1")
            agent.process.kill9()
            rank.kill()
            rank.wait(timeout=90)
        finally:
            service.served.process.signal(signal.SIGCONT)
    assert restored(run, MIB) == (1, digest_at(0, MIB))


def test_when_both_are_told_to_end_the_agent_finishes_what_it_has(run, service, tmp_path, monkeypatch):
    with agent_serve(tmp_path / "agent.log", "--grace", "90") as agent:
        monkeypatch.setenv("HOLDFAST_AGENT", str(agent.socket))
        with launched(RANK, run, 2, "told", MIB) as [rank]:
            say(rank)
            read_until(rank, "saved 0")
            wait_until(lambda: service.client.restores.restore_point(*run.split("/")).restore_point is not None)
            service.served.process.signal(signal.SIGSTOP)  # nothing can be committed before the rank is dead
            try:
                say(rank)
                read_until(rank, "saved 1")
                agent.process.signal(signal.SIGTERM)
                wait_until(lambda: not agent.socket.exists())  # the agent heard it before the rank did
                rank.kill()
                rank.wait(timeout=90)
            finally:
                service.served.process.signal(signal.SIGCONT)
            wait_until(lambda: not agent.process.runs)
        assert "committed for a rank that is gone" in agent.log
    assert restored(run, MIB) == (2, digest_at(1, MIB))


@pytest.mark.rule("overlap-is-guarded")
@pytest.mark.parametrize("local", [False, True], ids=["at once", "before it is in the spool"])
@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_copy_beside_training_is_finished_for_a_killed_rank_only_if_a_step_came_after_it(
    run, service, agent, tmp_path, has_stepped, local
):
    folder = [str(tmp_path / "nvme")] if local else []
    with launched("tests.support.overlapping_rank", run, int(has_stepped), *folder) as [rank]:
        read_until(rank, "ready")
        service.served.process.signal(signal.SIGSTOP)  # nothing can be sealed before the rank is dead
        try:
            say(rank)
            read_until(rank, "saved 1")
            rank.kill()
            rank.wait(timeout=90)
        finally:
            service.served.process.signal(signal.SIGCONT)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(Job(optimizer="momentum").state) == (2 if has_stepped else 1)
    assert ("was gone before it knew whether training had written" in agent.log) is not has_stepped


def launch_with_agent(socket, *command):
    """`holdfast launch --agent` around this, which is one rank alone."""
    environment = os.environ | rank_environment(0, 1, free_ports()) | {"HOLDFAST_AGENT": str(socket)}
    return subprocess.run(
        [HOLDFAST, "launch", "--agent", "--grace", "90", "--", *command],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture
def socket(tmp_path_factory):
    return tmp_path_factory.mktemp("a") / "agent.sock"


@pytest.mark.usefixtures("service")
def test_the_agent_of_a_launch_finishes_what_its_killed_rank_has_left_and_ends_after_it(run, socket):
    told = launch_with_agent(socket, sys.executable, "-m", RANK, run, "1", "killed", str(MIB))
    assert told.returncode == ExitCode.UNKNOWN
    assert "committed for a rank that is gone" in told.stderr
    assert not serves_at(socket)
    assert restored(run, MIB) == (1, digest_at(0, MIB))


@pytest.mark.usefixtures("service")
def test_a_launch_takes_the_agent_that_serves_already_and_leaves_it_there(run, agent):
    told = launch_with_agent(agent.socket, sys.executable, "-m", RANK, run, "1", "killed", str(MIB))
    assert told.returncode == ExitCode.UNKNOWN
    wait_until(lambda: status_of(agent.socket).counts.finished == 1)
    assert restored(run, MIB) == (1, digest_at(0, MIB))


def test_the_next_launch_waits_for_an_agent_that_still_finishes_what_the_one_before_has_left(
    run, service, tmp_path, monkeypatch
):
    with agent_serve(tmp_path / "agent.log", "--grace", "90") as agent:
        monkeypatch.setenv("HOLDFAST_AGENT", str(agent.socket))
        with launched(RANK, run, 1, "told", MIB) as [rank]:
            read_until(rank, "restored 0")
            service.served.process.signal(signal.SIGSTOP)  # nothing can be committed meanwhile
            try:
                say(rank)
                read_until(rank, "saved 0")
                agent.process.signal(signal.SIGTERM)
                wait_until(lambda: not agent.socket.exists())
                rank.kill()
                rank.wait(timeout=90)
                launch = subprocess.Popen(
                    [HOLDFAST, "launch", "--agent", "--grace", "90", "--", "touch", str(tmp_path / "began")],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                told = next((line for line in launch.stderr if "waiting until the agent before" in line), None)
                began = (tmp_path / "began").exists()
            finally:
                service.served.process.signal(signal.SIGCONT)
            launch.communicate(timeout=240)
    assert (told is not None, began, launch.returncode) == (True, False, ExitCode.OK)
    assert (tmp_path / "began").exists()
    assert "committed for a rank that is gone" in agent.log
    assert restored(run, MIB) == (1, digest_at(0, MIB))


def test_a_launch_that_cannot_have_an_agent_starts_no_job(tmp_path):
    tmp_path.chmod(0o770)
    told = launch_with_agent(tmp_path / "agent.sock", "touch", str(tmp_path / "started"))
    assert told.returncode == ExitCode.USAGE
    assert not (tmp_path / "started").exists()


def outcome_of(service, run):
    return service.client.attempts.get(*run.split("/"), 1).outcome


def test_what_a_preempted_job_has_left_uploading_is_committed(run, service, agent, monkeypatch):
    monkeypatch.setenv("HOLDFAST_MAX_BYTES_PER_SECOND", "131072")
    with launched(RANK, run, 1, "preempted", MIB // 2) as [rank]:
        read_until(rank, "saved 0")
        wait_until(lambda: service.client.checkpoints.all(*run.split("/")))
        agent.process.signal(signal.SIGSTOP)  # the reaper comes before it has finished
        say(rank)
        wait_for_end([rank])
    assert outcome_of(service, run) is AttemptOutcome.PREEMPTED
    for _ in range(2):  # the first one after a pause may only look at the clock
        service.client.controllers.wait(service.client.controllers.run("reap"), timeout_seconds=90)
    agent.process.signal(signal.SIGCONT)
    monkeypatch.delenv("HOLDFAST_MAX_BYTES_PER_SECOND")
    assert restored(run, MIB // 2) == (1, digest_at(0, MIB // 2))


def test_a_save_of_a_job_that_has_told_its_end_is_begun_and_committed(run, service, agent):
    with launched(RANK, run, 1, "ended", MIB) as [rank]:
        wait_for_end([rank])
    assert outcome_of(service, run) is AttemptOutcome.PREEMPTED
    assert restored(run, MIB) == (1, digest_at(0, MIB))


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_killed_at_any_moment_nothing_is_lost_or_wrong(run, service, tmp_path, monkeypatch, seed):
    """Rank or agent, one of them, at a random moment of three saves; then a launch that restores."""
    chance = random.Random(f"agent {seed}")
    size = 4 * MIB
    with agent_serve(tmp_path / "agent.log") as agent:
        monkeypatch.setenv("HOLDFAST_AGENT", str(agent.socket))
        with launched(RANK, run, 3, "stays", size) as [rank]:
            read_until(rank, "restored 0")
            moment, is_rank = chance.random() * 0.5, chance.random() < 0.5
            time.sleep(moment)  # decides nothing but where the kill comes
            if is_rank:
                rank.kill()
                rank.wait(timeout=90)
                said = rank.stdout.read().split()
                saved = said.count("saved")
            else:
                agent.process.kill9()
                read_until(rank, "saved 2")
                saved = 3
                say(rank)
                read_until(rank, "closed")
        start, digest = restored(run, size)
        assert start >= saved, f"seed {seed}: save() had returned for {saved}"
        assert digest == (digest_at(start - 1, size) if start else digest_of(state_of(-1, size)))
        views = service.client.checkpoints.all(*run.split("/"))
        assert {view.state for view in views} <= {CheckpointState.COMMITTED, CheckpointState.ABORTED}


def saves_that_returned(rank, until=None):
    """How many save() calls this rank told of, up to step `until`, or to its end."""
    count = 0
    for line in rank.stdout:
        count += line.startswith("saved")
        if line.strip() == f"saved {until}":
            break
    return count


@pytest.mark.parametrize("seed", range(2 * ROUNDS))
def test_killed_within_50_ms_of_a_save_that_returned_nothing_that_an_agent_had_is_lost_and_nothing_is_wrong(
    run, service, tmp_path, monkeypatch, seed
):
    world_size, victim = CASES[seed % len(CASES)]
    chance = random.Random(f"50 ms {seed}")
    size, saves = 4 * MIB, 3
    with agent_serve(tmp_path / "agent.log") as agent:
        monkeypatch.setenv("HOLDFAST_AGENT", str(agent.socket))
        with launched(RANK, run, saves, "stays", size, world_size=world_size) as ranks:
            step, first = chance.randrange(saves), chance.choice(ranks)
            counts = {first: saves_that_returned(first, step)}
            time.sleep(chance.random() * 0.05)  # decides nothing but where the kill comes
            if victim == "one rank":
                first.kill()
                counts |= {rank: saves_that_returned(rank, step) for rank in ranks if rank is not first}
            if victim in ("agent", "all"):
                agent.process.kill9()
            if victim == "agent":
                for rank in ranks:
                    say(rank)
                counts = {rank: counts.get(rank, 0) + saves_that_returned(rank) for rank in ranks}
            else:
                for rank in chance.sample(ranks, world_size):
                    rank.kill()
            wait_for_end(ranks)
            if victim in ("all ranks", "all"):
                counts = {rank: counts.get(rank, 0) + saves_that_returned(rank) for rank in ranks}
        # Nobody is left of all, and promises what it had.
        before = [view.step for view in service.client.checkpoints.all(*run.split("/")) if view.committed_at]
        had = 1 + max(before, default=-1) if victim == "all" else min(counts.values())
        start, digest = restored(run, size)
    told = f"seed {seed}: {victim} of {world_size}, returned for {[*counts.values()]}, had {had}, restored {start}"
    print(told)
    assert start >= had, told
    assert digest == (digest_at(start - 1, size) if start else digest_of(state_of(-1, size))), told
    assert {view.state for view in service.client.checkpoints.all(*run.split("/"))} <= {
        CheckpointState.COMMITTED,
        CheckpointState.ABORTED,
    }
