"""`holdfast launch` around real processes: what the child gets, what it is sent, and the exit code at the end."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest

from holdfast_client import Client, ClientSettings
from holdfast_client.cli import launch
from holdfast_protocol.attempts import AttemptView
from holdfast_protocol.states import AttemptOutcome, CheckpointKind
from tests.support.serve import HOLDFAST, ServedHoldfast, holdfast_serve, without_holdfast_settings

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
JOB = str(Path(__file__).with_name("launched_job.py"))
NO_SERVICE = {"HOLDFAST_URL": "http://127.0.0.1:9", "HOLDFAST_RETRY_SECONDS": "0"}


@contextmanager
def launched(
    *command: str, environment: dict[str, str] = NO_SERVICE, log: Path | None = None, grace: int = 30
) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") if log else nullcontext(subprocess.PIPE) as output:
        process = subprocess.Popen(
            [HOLDFAST, "launch", f"--grace={grace}", "--", *command],
            env=without_holdfast_settings() | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHoldfast]:
    with holdfast_serve(tmp_path_factory.mktemp("run")) as served:
        yield served


@pytest.fixture
def client(service: ServedHoldfast) -> Iterator[Client]:
    with Client(ClientSettings(url=service.url, data_dir=service.environment["HOLDFAST_DATA_DIR"])) as client:
        yield client


def of_job(service: ServedHoldfast, folder: Path) -> dict[str, str]:
    return service.environment | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}


def began(folder: Path, restart: int) -> tuple[list[int], list[int]]:
    """Per rank: the step at which it began, and its process."""
    texts = [(folder / f"began-{restart}-{rank}").read_text().split() for rank in (0, 1)]
    return [int(start) for start, _ in texts], [int(pid) for _, pid in texts]


def attempts(client: Client, run: str) -> list[AttemptView]:
    """The oldest first."""
    return list(client.attempts.all(*run.split("/")))[::-1]


def wait_for(path: Path, process: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.stdout.read() if process.stdout else path
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text()


def test_the_child_gets_its_own_group_free_signals_and_where_to_tell_and_its_own_code_is_ours():
    facts = (
        "import json, os, signal, sys\n"
        "print(json.dumps({'own_group': os.getpgrp() == os.getpid(),"
        " 'blocked': sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),"
        " 'folder': os.path.isdir(os.environ['HOLDFAST_OUTCOME_DIR']), 'launch': os.environ['HOLDFAST_LAUNCH'],"
        " 'arguments': sys.argv[1:]}), flush=True)\n"
        "sys.exit(7)"
    )
    with launched(sys.executable, "-c", facts, "--lr", "0.1", "--help") as process:
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 7
    told = json.loads(printed.splitlines()[0])
    assert told.pop("launch").isalnum()
    assert told == {"own_group": True, "blocked": [], "folder": True, "arguments": ["--lr", "0.1", "--help"]}
    assert "Exit code 7" in printed


def test_a_folder_that_cannot_be_removed_leaves_the_exit_code_as_it_is(tmp_path):
    child = (
        "import os, sys\n"
        "told = os.environ['HOLDFAST_OUTCOME_DIR']\n"
        "os.rename(told, told + '-moved')\n"
        "os.symlink(told + '-moved', told)\n"  # no tree is removed through a link
        "sys.exit(7)"
    )
    with launched(sys.executable, "-c", child, environment=NO_SERVICE | {"TMPDIR": str(tmp_path)}) as process:
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 7, printed


@pytest.mark.rule("told-outcome")
def test_signals_are_sent_on_as_they_come_and_who_was_told_to_end_is_launched_again(tmp_path):
    child = (
        "import os, pathlib, signal, sys\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (folder / 'usr1').write_text('seen'))\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))\n"
        "(folder / 'ready').write_text(str(os.getpid()))\n"
        "while True: signal.pause()"
    )
    with launched(sys.executable, "-c", child) as process:
        wait_for(tmp_path / "ready", process)
        process.send_signal(signal.SIGUSR1)
        assert wait_for(tmp_path / "usr1", process) is not None
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "Launch it again" in printed


def test_a_child_that_will_not_end_is_killed_with_its_group_once_the_grace_is_over(tmp_path):
    child = (
        "import os, pathlib, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "worker = os.fork()\n"
        "if worker:\n"
        f"    told = pathlib.Path({str(tmp_path)!r}, 'telling')\n"
        "    told.write_text(f'{os.getpid()} {worker}')\n"
        "    told.rename(told.with_name('ready'))\n"
        "while True: signal.pause()"
    )
    with launched(sys.executable, "-c", child, grace=1) as process:
        both = [psutil.Process(int(pid)) for pid in wait_for(tmp_path / "ready", process).split()]
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 75, printed
    assert "It is killed." in printed
    _, alive = psutil.wait_procs(both, timeout=60)
    assert alive == []


def test_ranks_in_sessions_of_their_own_are_killed_too_with_what_they_have_left_in_these(tmp_path):
    """As torchrun's ranks: one has a loader, and a process whose parent has gone already."""
    child = (
        "import os, pathlib, signal\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "told = lambda: (folder / str(os.getpid())).touch()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    told()\n"
        "    if os.fork() == 0:\n"
        "        told()\n"
        "    else:\n"
        "        between = os.fork()\n"
        "        if between == 0:\n"
        "            if os.fork() != 0: os._exit(0)\n"
        "            told()\n"
        "        else:\n"
        "            os.waitpid(between, 0)\n"
        "            (folder / 'orphaned').touch()\n"
        "while True: signal.pause()"
    )
    log = tmp_path / "log"
    with launched(sys.executable, "-c", child, grace=1, log=log) as process:
        wait_for(tmp_path / "orphaned", process)
        deadline = time.monotonic() + 60
        while len(names := [each.name for each in tmp_path.glob("[0-9]*")]) < 3:
            assert time.monotonic() < deadline, names
            time.sleep(0.02)
        ranks = [psutil.Process(int(name)) for name in names]
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    for each in alive:
        each.kill()
    assert process.returncode == 75, log.read_text()
    assert alive == []


class HiddenProcess:
    """Of another user, where /proc shows that it is there and nothing else (`hidepid=1`, or a security module)."""

    name = "1"

    def __truediv__(self, part: str) -> HiddenProcess:
        return self

    def read_text(self, **_: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"/proc/{self.name}/stat")


def test_the_jobs_processes_are_found_where_those_of_others_are_hidden(monkeypatch):
    """The command looks before it starts the job, and when it kills it: neither may end in an error."""

    class Proc(type(Path())):  # type: ignore[misc]
        def glob(self, pattern):
            return iter([HiddenProcess(), *super().glob(pattern)])

    monkeypatch.setattr(launch, "Path", Proc)
    with subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        started = psutil.Process(int(shell.stdout.readline()))
        try:
            assert {shell.pid, started.pid} <= set(launch._family_of([shell.pid]))
        finally:
            started.kill()
            shell.kill()


def test_what_a_shell_had_started_before_it_became_the_launch_is_none_of_the_jobs(tmp_path):
    """`tensorboard & exec holdfast launch …`."""
    job = "import signal; signal.signal(15, signal.SIG_IGN); open('job', 'w').close(); signal.pause(); signal.pause()"
    line = f"sleep 1000 & echo $!; exec {HOLDFAST} launch --grace 1 -- {sys.executable} -c {shlex.quote(job)}"
    shell = ["sh", "-c", line]
    process = subprocess.Popen(shell, cwd=tmp_path, env=without_holdfast_settings(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    beside = psutil.Process(int(process.stdout.readline()))
    try:
        wait_for(tmp_path / "job", process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75
        assert beside.status() != psutil.STATUS_ZOMBIE
    finally:
        beside.kill()
        process.kill()
        process.stdout.close()


@pytest.mark.rule("told-outcome")
def test_torchrun_does_not_start_preempted_ranks_again_and_never_gets_what_kills_it(tmp_path):
    """A stand-in of torchrun's name: its ranks have told that they were preempted, and it goes on, as with
    --max-restarts. The service is unavailable."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, signal, sys\n"
        "from holdfast_client.outcome_notes import OutcomeNote, write_note\n"
        "told = pathlib.Path(os.environ['HOLDFAST_OUTCOME_DIR'])\n"
        "def end(number, _):\n"
        f"    pathlib.Path({str(tmp_path / 'got')!r}).write_text(signal.Signals(number).name)\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "for attempt, outcome in ((1, 'failed'), (2, 'preempted')):\n"
        "    for rank in (2, 3):\n"
        "        note = OutcomeNote(project='demo', run='gpt', attempt=attempt, rank=rank, outcome=outcome)\n"
        "        write_note(told, note)\n"
        "while True: signal.pause()\n"
    )
    torchrun.chmod(0o755)
    with launched(str(torchrun)) as process:
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 75, printed
    assert (tmp_path / "got").read_text() == "SIGTERM"
    assert "demo/gpt, attempt 2," in printed


@pytest.mark.rule("told-outcome")
def test_ranks_whose_agent_another_process_has_killed_are_killed_too(tmp_path):
    """A stand-in of torchrun's name, with a rank that has a loader."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, signal\n"
        "agent = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    loader = os.fork()\n"
        "    if loader:\n"
        f"        told = pathlib.Path({str(tmp_path)!r}, 'telling')\n"
        "        told.write_text(f'{agent} {os.getpid()} {loader}')\n"
        "        told.rename(told.with_name('ready'))\n"
        "while True: signal.pause()\n"
    )
    torchrun.chmod(0o755)
    log = tmp_path / "log"
    with launched(str(torchrun), log=log) as process:
        agent, *ranks = (psutil.Process(int(pid)) for pid in wait_for(tmp_path / "ready", process).split())
        agent.kill()
        process.wait(timeout=60)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    for each in alive:
        each.kill()
    assert process.returncode == 128 + signal.SIGKILL, log.read_text()
    assert alive == []


def test_a_command_that_is_not_there_is_said():
    with launched("no-such-command", "--x") as process:
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "no-such-command cannot be started" in printed
    assert os.path.basename(HOLDFAST) in printed


@pytest.mark.rule("no-agent-store")
@pytest.mark.rule("told-outcome")
def test_a_rank_that_crashes_under_torchrun_is_started_again_and_the_job_finishes(service, client, tmp_path):
    log = tmp_path / "log"
    command = (*TORCHRUN, "--max-restarts=1", JOB, "tests/crashes", str(tmp_path), "6", "3")
    with launched(*command, environment=of_job(service, tmp_path), log=log) as process:
        process.wait(timeout=200)
    assert process.returncode == 0, log.read_text()
    assert began(tmp_path, 0)[0] == [0, 0]
    assert began(tmp_path, 1)[0] == [2, 2]
    first, second = attempts(client, "tests/crashes")
    assert first.outcome is not AttemptOutcome.FINISHED
    assert second.outcome is AttemptOutcome.FINISHED
    launch, _, own = second.launch_id.partition(".")
    assert own
    assert first.launch_id.startswith(f"{launch}.")
    assert first.launch_id != second.launch_id


@pytest.mark.rule("told-outcome")
def test_sigusr1_preempts_a_job_under_torchrun_and_nothing_is_left_behind(service, client, tmp_path):
    log = tmp_path / "log"
    command = (*TORCHRUN, "--max-restarts=3", JOB, "tests/preempted", str(tmp_path), "1000000")
    with launched(*command, environment=of_job(service, tmp_path), log=log) as process:
        wait_for(tmp_path / "newest", process)
        process.send_signal(signal.SIGUSR1)
        process.wait(timeout=200)
    assert process.returncode == 75, log.read_text()
    (attempt,) = attempts(client, "tests/preempted")
    assert attempt.outcome is AttemptOutcome.PREEMPTED
    newest = client.restores.restore_point("tests", "preempted").restore_point
    assert newest is not None
    assert newest.step >= int((tmp_path / "newest").read_text())
    (committed,) = client.checkpoints.list("tests", "preempted", limit=1).items
    assert (committed.step, committed.kind) == (newest.step, CheckpointKind.EMERGENCY)
    left = [psutil.Process(pid) for pid in began(tmp_path, 0)[1] if psutil.pid_exists(pid)]
    assert psutil.wait_procs(left, timeout=60)[1] == []
