"""`holdfast launch`: what the child's end and the job's outcome come to, and what a launcher is told. Pure."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from holdfast_client.cli.launch import (
    Outcome,
    ending_of,
    environment_of_child,
    is_preemption,
    is_torchrun,
    notes_from_catalog,
    outcome_of_launch,
    signal_for_child,
)
from holdfast_client.outcome_notes import OutcomeNote, read_notes, write_note
from holdfast_protocol.base import RunName
from holdfast_protocol.states import AttemptOutcome

RUN = RunName("demo", "gpt")
FINISHED, FAILED, PREEMPTED, FENCED, LOST = (
    AttemptOutcome.FINISHED,
    AttemptOutcome.FAILED,
    AttemptOutcome.PREEMPTED,
    AttemptOutcome.FENCED,
    AttemptOutcome.LOST,
)
NO_ATTEMPT = "no attempt"


def note(rank: int, outcome: AttemptOutcome | None = None, attempt: int = 1, run: str = "gpt") -> OutcomeNote:
    return OutcomeNote(project="demo", run=run, attempt=attempt, rank=rank, outcome=outcome)


@pytest.mark.rule("told-outcome")
@pytest.mark.parametrize(
    ("child", "outcome", "asked", "code"),
    [
        (0, FINISHED, False, 0),
        (0, FINISHED, True, 0),
        (0, PREEMPTED, False, 75),  # every rank caught Preempted and ended with 0: torchrun calls that finished
        (1, PREEMPTED, True, 75),
        (-9, PREEMPTED, True, 75),
        (1, FENCED, False, 79),
        (0, FENCED, True, 79),
        (3, FAILED, False, 3),
        (0, FAILED, False, 1),
        (75, FAILED, False, 1),
        (-9, FAILED, False, 137),
        (1, FAILED, True, 75),
        (1, FINISHED, False, 1),
        (79, FINISHED, False, 1),
        (-15, FINISHED, True, 75),
        (1, None, False, 76),
        (0, None, False, 76),
        (-9, None, False, 76),
        (-15, None, True, 75),
        (1, LOST, False, 76),
        (0, NO_ATTEMPT, False, 0),
        (75, NO_ATTEMPT, False, 75),
        (-9, NO_ATTEMPT, False, 137),
        (-15, NO_ATTEMPT, True, 75),
        (0, NO_ATTEMPT, True, 0),
    ],
)
def test_the_exit_code_tells_whether_to_launch_again(child, outcome, asked, code):
    known = None if outcome is NO_ATTEMPT else Outcome(RUN, 3, outcome)
    ending = ending_of(child, known, asked_to_end=asked)
    assert ending.code == code
    assert ending.what.endswith(".")


def never(_run, _attempt):
    raise AssertionError("the catalog is not asked where rank 0's word is here")


def test_the_word_of_rank_0_on_the_last_attempt_counts():
    notes = [note(0, FAILED), note(1, FAILED), note(0, FINISHED, 2), note(1, FAILED, 2)]
    assert outcome_of_launch(notes, never, 0) == Outcome(RUN, 2, FINISHED)
    assert outcome_of_launch([], never, 0) is None


def test_the_catalog_knows_where_rank_0_is_elsewhere_and_is_waited_for():
    answers = [(None, ""), (PREEMPTED, "told to go")]
    found = outcome_of_launch([note(8, FINISHED), note(9)], lambda *_: answers.pop(0), 60)
    assert found == Outcome(RUN, 1, PREEMPTED, "told to go")


def test_a_rank_0_that_died_here_without_a_word_is_not_waited_for():
    asked = []

    def ask(run, attempt):
        asked.append((run, attempt))
        return None, ""

    assert outcome_of_launch([note(0), note(1, FAILED)], ask, 3600).outcome is FAILED
    assert outcome_of_launch([note(0), note(1)], ask, 3600).outcome is None
    assert asked == [(RUN, 1)] * 2


def test_without_the_service_the_ranks_of_this_node_tell_the_gravest():
    away = [note(8, PREEMPTED), note(9, FINISHED)]
    assert outcome_of_launch(away, lambda *_: None, 3600).outcome is PREEMPTED
    assert outcome_of_launch([note(8, None)], lambda *_: None, 3600).outcome is None


def test_ranks_that_could_leave_no_note_are_known_by_their_launch():
    def attempts(project, run, limit):
        assert (project, run) == ("demo", "gpt")
        ids = ["another.1", "mine.2", "mine.1", "older.1"]
        return SimpleNamespace(
            items=[SimpleNamespace(number=9 - at, launch_id=launch_id) for at, launch_id in enumerate(ids)]
        )

    client = SimpleNamespace(attempts=SimpleNamespace(list=attempts))
    notes = notes_from_catalog(client, RUN, "mine")
    assert outcome_of_launch(notes, lambda *_: (PREEMPTED, ""), 0) == Outcome(RUN, 8, PREEMPTED)
    assert outcome_of_launch(notes, lambda *_: None, 0) == Outcome(RUN, 8, None)
    assert notes_from_catalog(client, RUN, "min") == []


def test_of_several_runs_the_gravest_is_told():
    notes = [note(0, FINISHED), note(0, FENCED, run="teacher")]
    found = outcome_of_launch(notes, never, 0)
    assert (found.run.run, found.outcome) == ("teacher", FENCED)


def test_a_launch_that_was_fenced_before_it_had_a_number_is_fenced():
    assert outcome_of_launch([note(0, FAILED, 4), note(0, FENCED, 0)], never, 0).outcome is FENCED


def test_a_note_is_whole_or_not_there(tmp_path):
    write_note(tmp_path, note(0))
    write_note(tmp_path, note(0, PREEMPTED))
    (tmp_path / "demo.gpt.9.0.outcome.json").write_text('{"project": "de')
    (tmp_path / "demo.gpt.1.1.77.tmp").write_text("half")
    assert read_notes(tmp_path) == [note(0, PREEMPTED)]


@pytest.mark.parametrize(
    ("command", "torchrun"),
    [
        ("torchrun --nproc-per-node 8 train.py", True),
        ("/opt/venv/bin/torchrun train.py", True),
        ("python -m torch.distributed.run train.py", True),
        ("numactl --cpunodebind=0 torchrun train.py", True),
        ("accelerate launch train.py", True),
        ("python train.py", False),
        ("python train.py --logs torchrun-logs", False),
        ("deepspeed train.py", False),
    ],
)
def test_torchrun_is_known_by_its_command(command, torchrun):
    assert is_torchrun(command.split()) is torchrun
    assert is_torchrun(["bash", "-c", command]) is (torchrun and "torchrun" in command)


@pytest.mark.rule("told-outcome")
def test_no_signal_that_would_kill_torchruns_agent_reaches_it_and_a_notice_only_once():
    assert signal_for_child(signal.SIGUSR1, torchrun=True, already_asked=False) == signal.SIGTERM
    assert signal_for_child(signal.SIGUSR2, torchrun=True, already_asked=False) == signal.SIGTERM
    assert signal_for_child(signal.SIGTERM, torchrun=True, already_asked=True) is None
    assert signal_for_child(signal.SIGINT, torchrun=True, already_asked=True) == signal.SIGINT
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        assert signal_for_child(number, torchrun=False, already_asked=True) == number
    assert is_preemption(signal.SIGUSR1, torchrun=False)
    assert not is_preemption(signal.SIGINT, torchrun=True)


@pytest.mark.rule("no-agent-store")
def test_the_child_shares_no_store_with_torchruns_agent_unless_the_user_says_so():
    mine = {"PATH": "/bin", "HOLDFAST_LAUNCH": "an outer one"}
    environment = environment_of_child(mine, "abc", "/tmp/told", 240)
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "240"
    assert float(environment["HOLDFAST_PREEMPTION_GRACE_SECONDS"]) == 237
    assert "SIGUSR1" in environment["PET_SIGNALS_TO_HANDLE"].split(",")
    assert (environment["HOLDFAST_LAUNCH"], environment["HOLDFAST_OUTCOME_DIR"]) == ("abc", "/tmp/told")
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    assert environment_of_child(own, "abc", "/tmp/told", 240).items() >= own.items()
