"""Saves made while service or store was unavailable: none is lost, whoever dies; all are committed, in order."""

from __future__ import annotations

import json
import os

import pytest

import holdfast
from holdfast import errors
from holdfast_client.local.tier import LocalTier
from holdfast_protocol.states import CheckpointState
from tests.support.forked import run_forked
from tests.support.ranks import launched, read_until
from tests.support.seaweedfs import seaweedfs_server
from tests.support.serve import ENTRY_POINT
from tests.support.training import Job, train, values

TRAINER = "tests.chaos.spooling_trainer"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "nvme"


@pytest.fixture(autouse=True)
def short_retry_deadline(service, monkeypatch):
    """One try of a call; a save with a local tier has as many as it takes."""
    monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "1")
    monkeypatch.setenv("HOLDFAST_SAVE_RETRY_SECONDS", "1")
    monkeypatch.setenv("HOLDFAST_COLLECTIVE_TIMEOUT_SECONDS", "120")


def go_on_without(service, ranks):
    """The service is killed while all ranks wait; then they train to their end, and say their states."""
    for process in ranks:
        read_until(process, "waiting")
    service.kill9()
    for process in ranks:
        process.stdin.write("\n")
        process.stdin.flush()
    states = [read_until(process, "state")[-1] for process in ranks]
    for process in ranks:
        process.kill()
        process.wait()
    return states


def spooled_steps(folder):
    tier = LocalTier(folder, None)
    try:
        return [record.step for record in tier.spool.read().records]
    finally:
        tier.close()


def committed(client, run):
    """(step, attempt that staged it, attempt that pushed it), in the order of the commits."""
    views = client.checkpoints.all("tests", run, state=CheckpointState.COMMITTED)
    return [(v.step, v.attempt, v.pushed_by) for v in sorted(views, key=lambda view: view.committed_at)]


def cli(*arguments):
    return run_forked(ENTRY_POINT, ["spool", *map(str, arguments)], environment=os.environ)


@pytest.mark.rule("late-save-adoption")
def test_saves_of_an_outage_are_committed_in_order_by_the_same_job(client, service, folder, caplog):
    job = Job()
    with holdfast.Checkpointer("tests/outage", create=True, local=folder) as ckpt:
        ckpt.restore(job.state)
        ckpt.save(0, job.state).committed.result(timeout=60)
        service.kill9()
        handles = []
        for step in (1, 2, 3):
            job.step(step)
            handles.append(ckpt.save(step, job.state))
            assert handles[-1].local.result(timeout=60), "durable here, whatever the service does"
        while "safe on this node and not committed yet" not in caplog.text:
            assert not any(handle.committed.done() for handle in handles)
        service.start()
        assert [handle.committed.result(timeout=120).step for handle in handles] == [1, 2, 3]
        assert (ckpt.stats.spooled, ckpt.stats.committed, ckpt.stats.failed) == (4, 4, 0)
        assert ckpt.stats.committed_late == 1, "one was tried and failed, the others waited behind it"
    assert committed(client, "outage") == [(step, 1, None) for step in range(4)]
    assert spooled_steps(folder) == []
    restored = Job(seed=3)
    with holdfast.Checkpointer("tests/outage", local=folder) as ckpt:
        assert ckpt.restore(restored.state) == 4
    assert values(restored.state) == values(job.state)


@pytest.mark.rule("late-save-adoption")
def test_a_job_killed_with_spooled_saves_resumes_from_the_newest_of_them_bit_for_bit(client, service, folder):
    with launched(TRAINER, "tests/killed", folder, 5, "wait", 2) as ranks:
        [state] = go_on_without(service, ranks)
    assert spooled_steps(folder)[-3:] == [2, 3, 4]
    service.start()
    with launched(TRAINER, "tests/killed", folder, 5) as [second]:
        assert read_until(second, "state") == ["start 5", state], "restored, and not one step of it trained again"
    assert committed(client, "killed")[-3:] == [(2, 1, 2), (3, 1, 2), (4, 1, 2)]
    assert spooled_steps(folder) == []
    whole = train(0, None, 7)
    third = train(0, "tests/killed", 7)
    assert (third.start, third.final) == (5, whole.final)


@pytest.mark.rule("late-save-adoption")
@pytest.mark.parametrize(
    ("dies", "resumes"), [("chunk", 2), ("record", 3), ("upload", 3), ("commit", 3)], ids=lambda value: str(value)
)
def test_a_kill_at_any_point_of_a_save_costs_at_most_what_was_not_yet_on_the_disk(
    client, service, folder, dies, resumes
):
    run = f"dies-{dies}"
    with launched(TRAINER, f"tests/{run}", folder, 3, dies, 2) as [first]:
        first.wait(timeout=120)
        assert first.returncode == -9
    with launched(TRAINER, f"tests/{run}", folder, 3) as [second]:
        assert read_until(second, "state")[0] == f"start {resumes}"
        assert [step for step, *_ in committed(client, run)][:resumes] == list(range(resumes))
    tier = LocalTier(folder, None)
    # The second was killed too, maybe before its own save was committed.
    assert all(record.attempt == 2 for record in tier.spool.read().records)
    assert tier.folder.holds() == [record.name for record in tier.spool.read().records], "nothing else is kept"
    assert os.listdir(folder / "incoming") == []
    tier.close()


@pytest.mark.rule("late-save-adoption")
def test_two_ranks_adopt_what_both_had_spooled(client, service, folder):
    with launched(TRAINER, "tests/two", folder, 4, "wait", 2, world_size=2) as ranks:
        states = set(go_on_without(service, ranks))
    assert len(states) == 2, "each rank has its own random numbers"
    service.start()
    with launched(TRAINER, "tests/two", folder, 4, world_size=2) as ranks:
        told = [read_until(process, "state") for process in ranks]
    assert [lines[0] for lines in told] == ["start 4"] * 2
    assert {lines[-1] for lines in told} == states
    assert [step for step, *_ in committed(client, "two")] == [0, 1, 2, 3]
    assert spooled_steps(folder) == []


@pytest.mark.rule("late-save-adoption")
def test_one_rank_adopts_what_two_had_spooled(client, service, folder):
    with launched(TRAINER, "tests/fewer", folder, 3, "wait", 1, world_size=2) as ranks:
        go_on_without(service, ranks)
    service.start()
    with holdfast.Checkpointer("tests/fewer", local=folder) as ckpt:
        view = ckpt.parts.session.open().restore_point
    assert (view.step, view.world_size) == (2, 2)
    assert spooled_steps(folder) == []


class TestStoreAway:
    @pytest.fixture
    def weed(self):
        with seaweedfs_server() as server:
            yield server

    @pytest.fixture
    def service_settings(self, weed):
        return {"HOLDFAST_STORE": weed.store_url, **weed.environment}

    @pytest.mark.rule("late-save-adoption")
    def test_while_the_store_is_unavailable_saves_collect_on_the_node_and_commit_when_it_is_back(
        self, client, service, weed, folder, caplog
    ):
        job = Job()
        with holdfast.Checkpointer("tests/store", create=True, local=folder) as ckpt:
            ckpt.restore(job.state)
            ckpt.save(0, job.state).committed.result(timeout=60)
            weed.stop()
            handles = []
            for step in (1, 2):
                job.step(step)
                handles.append(ckpt.save(step, job.state))
                assert handles[-1].local.result(timeout=60)
            while "safe on this node and not committed yet" not in caplog.text:
                assert not any(handle.committed.done() for handle in handles)
            weed.start()
            assert [handle.committed.result(timeout=120).step for handle in handles] == [1, 2]
        assert committed(client, "store") == [(step, 1, None) for step in range(3)]


def leave_two_saves(service, run, folder, monkeypatch):
    """Steps 1 and 2 are in the spool, and step 0 is committed; the service is there again."""
    job = Job()
    monkeypatch.setenv("HOLDFAST_DRAIN_SECONDS", "0")
    with holdfast.Checkpointer(f"tests/{run}", create=True, local=folder) as ckpt:
        ckpt.restore(job.state)
        ckpt.save(0, job.state).committed.result(timeout=60)
        service.kill9()
        handles = []
        for step in (1, 2):
            job.step(step)
            handles.append(ckpt.save(step, job.state))
            assert handles[-1].local.result(timeout=60)
    service.start()
    return job, handles


@pytest.mark.rule("late-save-adoption")
def test_what_a_job_that_ended_left_is_pushed_by_the_command(client, service, folder, monkeypatch, caplog):
    job, handles = leave_two_saves(service, "push", folder, monkeypatch)
    for handle in handles:
        assert isinstance(handle.committed.exception(timeout=1), errors.SaveSpooled)
    assert f"holdfast spool push --dir {folder}" in caplog.text
    listed = json.loads(cli("list", "--dir", folder, "--json").stdout)
    assert [(save["step"], save["attempt"], save["ranks"]) for save in listed] == [(1, 1, [0]), (2, 1, [0])]
    pushed = cli("push", "--dir", folder)
    assert (pushed.returncode, pushed.stdout.splitlines()) == (
        0,
        ["tests/push step 1: committed", "tests/push step 2: committed"],
    )
    assert [step for step, *_ in committed(client, "push")] == [0, 1, 2]
    restored = Job(seed=3)
    with holdfast.Checkpointer("tests/push") as ckpt:
        assert ckpt.restore(restored.state) == 3
    assert values(restored.state) == values(job.state)
    assert cli("push", "--dir", folder).returncode == 0


@pytest.mark.rule("late-save-adoption")
def test_what_the_run_has_gone_on_without_is_kept_beside_the_line_only_if_asked_for(
    client, service, folder, monkeypatch
):
    leave_two_saves(service, "branch", folder, monkeypatch)
    elsewhere = Job()
    with holdfast.Checkpointer("tests/branch") as ckpt:  # a node without the folder: it goes on from step 0
        assert ckpt.restore(elsewhere.state) == 1
        ckpt.save(1, elsewhere.state).committed.result(timeout=60)
    refused = cli("push", "--dir", folder)
    assert refused.returncode == 1
    assert "--detached" in refused.stdout
    assert spooled_steps(folder) == [1, 2]
    with holdfast.Checkpointer("tests/branch", local=folder) as ckpt:  # nor does an attempt adopt it
        assert ckpt.restore(elsewhere.state) == 2
    kept = cli("push", "--dir", folder, "--detached")
    assert (kept.returncode, kept.stdout.count("committed, detached")) == (0, 2), kept.stdout
    assert client.restores.restore_point("tests", "branch").restore_point.attempt == 2
    assert client.checkpoints.select("tests", "branch", "2#1").detached
    assert spooled_steps(folder) == []


@pytest.mark.rule("late-save-adoption")
def test_a_flipped_bit_in_the_spool_is_told_and_never_pushed(client, service, folder, monkeypatch, caplog):
    leave_two_saves(service, "rotten", folder, monkeypatch)
    tier = LocalTier(folder, None)
    second = tier.spool.read().records[1]
    own = {chunk.digest for chunk in second.chunks} - {chunk.digest for chunk in tier.spool.read().records[0].chunks}
    tier.close()
    digest = min(own)
    path = folder / digest[:2] / digest
    path.chmod(0o600)
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    job = Job(seed=3)
    with holdfast.Checkpointer("tests/rotten", local=folder) as ckpt:
        assert ckpt.restore(job.state) == 2, "step 1 was adopted, step 2 cannot be"
    assert f"Chunk {digest[:12]}" in caplog.text
    assert spooled_steps(folder) == [2]
    refused = cli("push", "--dir", folder)
    assert refused.returncode == 1
    assert f"Chunk {digest[:12]}" in refused.stdout
    assert cli("drop", "--dir", folder).returncode == 2
    assert spooled_steps(folder) == [2], "nothing is dropped without --yes"
    assert cli("drop", "--dir", folder, "--yes").returncode == 0
    assert spooled_steps(folder) == []
    assert LocalTier(folder, None).folder.holds() == []


@pytest.mark.rule("late-save-adoption")
def test_a_save_of_which_a_rank_is_missing_stays_and_training_resumes_from_what_is_committed(
    client, service, folder, caplog
):
    with launched(TRAINER, "tests/half", folder, 3, "wait", 1, world_size=2) as ranks:
        go_on_without(service, ranks)
    service.start()
    tier = LocalTier(folder, None)
    gone = [record for record in tier.spool.read().records if (record.step, record.rank) == (2, 1)]
    tier.spool.forget(gone[0].name)  # as if rank 1 had run on another node
    tier.close()
    with holdfast.Checkpointer("tests/half", local=folder) as ckpt:
        assert ckpt.parts.session.open().restore_point.step == 1
    assert (
        "step 2 of attempt 1 is in the spool and stays there: no node of this job has the shards of rank 1"
        in caplog.text
    )
    assert spooled_steps(folder) == [2]
    assert "rank 1 too" in cli("push", "--dir", folder).stdout
