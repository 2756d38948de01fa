"""Nobody trains from scratch by accident, and a job that lost its run stops: what raises, and what it says."""

from __future__ import annotations

import copy
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from tests.support.training import Job, train, values

import holdfast
from holdfast import errors
from holdfast_protocol.attempts import OpenAttempt
from holdfast_protocol.checkpoints import EditCheckpoint
from holdfast_protocol.runs import EditProject
from holdfast_protocol.states import Health, QuotaKind


@pytest.mark.rule("no-silent-fresh-start")
@pytest.mark.rule("one-vote-per-step")
def test_a_mistyped_run_raises_and_names_the_one_that_was_meant(own_service):
    train(0, "tests/llama-pretrain", 2)
    job = Job()
    before = values(job.state)
    with (
        holdfast.Checkpointer("tests/lama-pretrain") as ckpt,
        pytest.raises(errors.RunNotFound, match="llama-pretrain"),
    ):
        ckpt.restore(job.state)
    assert values(job.state) == before


@pytest.mark.rule("no-silent-fresh-start")
@pytest.mark.rule("one-vote-per-step")
def test_an_absent_service_raises_and_never_begins_from_zero(monkeypatch):
    monkeypatch.setenv("HOLDFAST_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOLDFAST_TOKEN", "hold_a_b")
    monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "1")
    with (
        holdfast.Checkpointer("tests/absent") as ckpt,
        pytest.raises(errors.ServiceUnavailable, match="holdfast serve"),
    ):
        ckpt.restore({})


@pytest.mark.rule("quota-reserved")
@pytest.mark.parametrize("kind", [QuotaKind.CHECKPOINTS, QuotaKind.OBJECTS])
def test_a_save_over_a_quota_fails_and_says_so_and_restores_go_on(run, service, kind):
    job = Job()
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state)
        job.step(0)
        ckpt.save(0, job.state).committed.result(timeout=60)
        saved = copy.deepcopy(values(job.state))
        project = service.client.projects.get(service.project.name)
        (used,) = [each.used for each in project.quotas if each.kind is kind]
        service.client.projects.edit(project.name, EditProject(**{f"quota_{kind}": used}), etag=project.etag)
        job.step(1)
        failed = ckpt.save(1, job.state).committed.exception(timeout=60)
        assert isinstance(failed, errors.SaveFailed)
        assert f"has 0 {kind} left of its quota of {used}" in str(failed)
    resumed = Job(seed=7)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(resumed.state) == 1
    assert values(resumed.state) == saved


def test_a_wrong_token_raises_with_the_remedy(run, monkeypatch):
    monkeypatch.setenv("HOLDFAST_TOKEN", "hold_0000000000000000_" + "0" * 64)
    with holdfast.Checkpointer(run) as ckpt, pytest.raises(errors.Unauthenticated, match="HOLDFAST_TOKEN"):
        ckpt.restore({})


@pytest.mark.rule("no-silent-fresh-start")
@pytest.mark.rule("one-vote-per-step")
def test_a_run_whose_checkpoints_are_all_unusable_raises_instead_of_beginning_anew(run, service):
    train(0, run, 2)
    for view in service.client.checkpoints.all(*run.split("/")):
        service.client.checkpoints.edit(
            view.id, EditCheckpoint(health=Health.QUARANTINED, health_reason="bad batch"), view.etag
        )
    job = Job()
    before = values(job.state)
    with holdfast.Checkpointer(run) as ckpt, pytest.raises(errors.NoRestorePoint, match="bad batch"):
        ckpt.restore(job.state)
    assert values(job.state) == before


def test_a_step_that_is_not_there_is_never_replaced_by_another(run):
    train(0, run, 2)
    with holdfast.Checkpointer(run) as ckpt, pytest.raises((errors.CheckpointNotFound, errors.NoRestorePoint)):
        ckpt.restore({}, at="77")


def test_saving_over_existing_checkpoints_without_a_restore_raises(run):
    train(0, run, 2)
    with holdfast.Checkpointer(run) as ckpt, pytest.raises(errors.NotRestored, match=r"restore\(state\)"):
        ckpt.step(0, {})


def test_no_run_or_a_malformed_one_is_named_before_anything_is_opened(monkeypatch):
    with pytest.raises(errors.ConfigurationError, match="HOLDFAST_RUN"):
        holdfast.Checkpointer()
    with pytest.raises(errors.ConfigurationError, match="project/run"):
        holdfast.Checkpointer("no-slash")
    monkeypatch.setenv("HOLDFAST_DRAIN_SECONDS", "soon")
    with pytest.raises(errors.ConfigurationError, match="HOLDFAST_DRAIN_SECONDS"):
        holdfast.Checkpointer("a/b")


def test_the_run_comes_from_the_environment(run, monkeypatch):
    monkeypatch.setenv("HOLDFAST_RUN", run)
    with holdfast.Checkpointer() as ckpt:
        assert ckpt.run == run
        assert ckpt.restore({}) == 0


def test_a_launcher_without_torch_distributed_is_not_taken_for_a_lone_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(errors.ConfigurationError, match="init_process_group"):
        holdfast.Checkpointer("a/b")


def test_of_two_launches_the_earlier_gets_stale_attempt_in_its_training_thread(run):
    with holdfast.Checkpointer(run) as earlier:
        earlier.restore({})
        earlier.save(0, {}).committed.result(timeout=60)
        with holdfast.Checkpointer(run) as later:
            assert later.restore({}) == 1
            handle = earlier.save(1, {})
            assert isinstance(handle.committed.exception(timeout=60), errors.SaveFailed)
            with pytest.raises(errors.StaleAttempt, match="must not be restarted"):
                earlier.step(2, {})
            with pytest.raises(errors.StaleAttempt):
                earlier.save(3, {})
            later.save(1, {}).committed.result(timeout=60)


def test_the_earlier_launch_learns_it_by_its_heartbeat_while_it_saves_nothing(own_service):
    with holdfast.Checkpointer("tests/beat", create=True) as earlier:
        earlier.parts.session.open()
        opened = earlier.parts.session.opened
        earlier.parts.session._heartbeat._stop.set()  # the test beats by hand, for the service's interval is long
        own_service.client.attempts.open("tests", "beat", OpenAttempt(launch_id="later", after=1, world_size=1))
        earlier.parts.session._heartbeat._stop.clear()
        object.__setattr__(opened, "heartbeat_interval_seconds", 0.01)
        earlier.parts.session._heartbeat._beat()
        earlier.parts.session.may_save = True
        with pytest.raises(errors.StaleAttempt):
            earlier.step(0, {})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_log_handler_that_raises_does_not_end_the_heartbeats(own_service, caplog, monkeypatch):
    """Else the service would take a healthy attempt for lost."""
    beats = []

    def raising(record):
        raise BrokenPipeError("the script's log is gone")

    def heartbeat(*_):
        beats.append(time.monotonic())
        raise errors.ServiceUnavailable("no answer")

    monkeypatch.setattr(threading, "excepthook", raising)  # the script's too
    logger = logging.getLogger("holdfast")
    caplog.set_level(logging.INFO, "holdfast")
    with holdfast.Checkpointer("tests/logs", create=True) as ckpt:
        session = ckpt.parts.session
        session.open()
        object.__setattr__(session.opened, "heartbeat_interval_seconds", 0.01)
        session._heartbeat._client.attempts.heartbeat = heartbeat
        logger.addFilter(raising)
        try:
            beating = threading.Thread(target=session._heartbeat._beat, daemon=True)
            beating.start()
            until = time.monotonic() + 60
            while len(beats) < 3 and beating.is_alive():
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            logger.removeFilter(raising)
        assert len(beats) >= 3


def test_a_failing_service_never_stops_training_and_the_next_save_goes_on(own_service, caplog):
    with holdfast.Checkpointer("tests/outage", create=True, save=holdfast.Every(steps=1)) as ckpt:
        ckpt.restore({})
        ckpt.step(0, {}).committed.result(timeout=60)
        os.kill(own_service.served.process.pid, signal.SIGSTOP)
        try:
            with caplog.at_level(logging.WARNING, logger="holdfast"):
                handle = ckpt.step(1, {})
                assert handle.staged.done()
                time.sleep(0.2)
                declined = ckpt.step(2, {})
                assert isinstance(declined.committed.exception(timeout=0), errors.SaveDeclined)
        finally:
            os.kill(own_service.served.process.pid, signal.SIGCONT)
        assert "still in flight" in caplog.text
        handle.committed.exception(timeout=120)
        ckpt.wait()
        ckpt.step(3, {}).committed.result(timeout=60)
        assert ckpt.stats.declined == 1


def test_strict_raises_what_is_only_logged_otherwise(own_service):
    ckpt = holdfast.Checkpointer("tests/strict", create=True, strict=True)
    ckpt.restore({})
    own_service.served.process.stop()
    ckpt.save(1, {}).committed.exception(timeout=60)
    with pytest.raises(errors.SaveFailed, match="step 1"):
        ckpt.step(2, {})
    ckpt.close()


def test_a_save_that_failed_is_counted_and_says_why(own_service, caplog):
    with holdfast.Checkpointer("tests/lost", create=True) as ckpt:
        ckpt.restore({})
        own_service.served.process.stop()
        with caplog.at_level(logging.WARNING, logger="holdfast"):
            failed = ckpt.save(1, {}).committed.exception(timeout=60)
        assert isinstance(failed.__cause__, errors.ServiceUnavailable)
        assert ckpt.stats.failed == 1
        assert "Training goes on" in caplog.text
        ckpt.step(2, {})


@pytest.mark.parametrize(
    ("drop", "state", "metrics", "named"),
    [
        ([], {"k" * 201: 1}, None, "components.kkk"),
        ([], {}, {f"{number}{chr(0x1F600) * 90}": 1.0 for number in range(1000)}, "metrics"),
        ([f"c{number}" for number in range(101)], {}, None, "dropped_components"),
    ],
    ids=["a long key", "large metrics", "many dropped components"],
)
def test_what_the_service_would_not_take_raises_before_the_vote_and_the_next_save_goes_on(
    run, drop, state, metrics, named
):
    with holdfast.Checkpointer(run, drop=drop) as ckpt:
        ckpt.restore({})
        with pytest.raises(errors.StateError, match=f"the service cannot take {named}"):
            ckpt.save(0, state, metrics)
        if not drop:
            assert ckpt.save(1, {}).committed.result(timeout=60).step == 1, "the staging memory is free"


def test_a_save_that_no_thread_would_upload_raises(run):
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({})
        ckpt.save(0, {}).committed.result(timeout=60)
        child = os.fork()
        if child == 0:
            try:
                ckpt.save(1, {})
            except errors.ConfigurationError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(errors.ConfigurationError, match="too late"):
        ckpt.save(1, {})


def test_save_waits_for_the_earlier_save_instead_of_declining(run):
    state = {"big": {"t": torch.randn(2_000_000)}}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(state)
        handles = [ckpt.save(step, state) for step in range(4)]
        assert [handle.committed.result(timeout=60).step for handle in handles] == [0, 1, 2, 3]
        assert ckpt.stats.declined == 0


@pytest.mark.rule("bounded-exit")
def test_a_save_in_flight_at_the_end_of_the_program_is_finished(run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, holdfast\n"
        "state = {'t': {'x': torch.randn(3_000_000)}}\n"
        "ckpt = holdfast.Checkpointer(sys.argv[1])\n"
        "ckpt.restore(state)\n"
        "ckpt.save(5, state)\n"  # no with, no close, no wait
    )
    subprocess.run([sys.executable, script, run], check=True, timeout=120)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore({}, at="latest") == 6


@pytest.mark.rule("bounded-exit")
def test_leaving_the_block_waits_for_the_save_in_flight_within_a_bound(own_service, monkeypatch):
    monkeypatch.setenv("HOLDFAST_DRAIN_SECONDS", "1")
    monkeypatch.setenv("HOLDFAST_SAVE_RETRY_SECONDS", "900")
    with holdfast.Checkpointer("tests/drain", create=True) as ckpt:
        ckpt.restore({})
        own_service.served.process.stop()
        handle = ckpt.save(1, {})
        began = time.monotonic()
    assert time.monotonic() - began < 30
    assert not handle.committed.done() or handle.committed.exception() is not None


def test_a_forked_child_that_exits_does_not_end_its_parents_attempt(run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch, holdfast\n"
        "state = {'t': {'x': torch.randn(100)}}\n"
        "ckpt = holdfast.Checkpointer(sys.argv[1])\n"
        "ckpt.restore(state)\n"
        "ckpt.save(0, state).committed.result(timeout=60)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(0)\n"  # an ordinary end, with the handlers of an ordinary end
        "os.waitpid(child, 0)\n"
        "ckpt.save(1, state).committed.result(timeout=60)\n"
    )
    subprocess.run([sys.executable, script, run], check=True, timeout=120)


def test_a_program_that_ends_by_an_exception_is_not_noted_as_finished(run, service, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, holdfast\n"
        "ckpt = holdfast.Checkpointer(sys.argv[1])\n"
        "ckpt.restore({})\n"
        "raise RuntimeError('out of memory')\n"  # no with, no close
    )
    subprocess.run([sys.executable, script, run], check=False, timeout=120, capture_output=True)
    [attempt] = service.client.attempts.list(*run.split("/")).items
    assert (attempt.outcome, attempt.outcome_detail) == ("failed", "RuntimeError: out of memory")


def test_saving_a_committed_step_again_is_fine_with_the_same_content_and_refused_with_other(run):
    state = {"t": {"x": torch.randn(100)}}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(state)
        first = ckpt.save(0, state, metrics={"loss": 1.0}).committed.result(timeout=60)
        again = ckpt.save(0, state, metrics={"loss": 1.0}).committed.result(timeout=60)
        assert (again.id, again.digest) == (first.id, first.digest)
        state["t"]["x"] += 1
        refused = ckpt.save(0, state, metrics={"loss": 1.0}).committed.exception(timeout=60)
        assert "save under another step" in str(refused)
        ckpt.save(1, state).committed.result(timeout=60)


def test_the_same_lines_for_people_at_restore_and_commit(run, caplog):
    with caplog.at_level(logging.INFO, logger="holdfast"):
        train(0, run, 2)
        train(0, run, 2)
    assert f"{run} begins: nothing was ever committed" in caplog.text
    assert f"committed {run} at step 1" in caplog.text
    assert f"resumed {run} from step 1" in caplog.text
