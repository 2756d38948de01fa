"""Each example survives what its docstring promises: killed without warning, launched again, it goes on, equal in
every digit to the steps that it had already printed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast_client import Client, ClientSettings
from tests.support.serve import ServedHoldfast, holdfast_serve, without_holdfast_settings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
COUNTING_FROM_ONE = {"hf.py", "lora.py", "lightning_fit.py"}
"""In these frameworks step 20 is the twentieth, and its checkpoint is named so."""
ENDLESS = 10_000_000
_STEP = re.compile(r"^step (\d+) loss (\S+)$", flags=re.MULTILINE)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHoldfast]:
    with holdfast_serve(tmp_path_factory.mktemp("examples")) as served:
        yield served


def command(example: str, ranks: int, run: str, steps: int) -> list[str]:
    launcher = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks else []
    return [sys.executable, *launcher, str(EXAMPLES / example), run, "--steps", str(steps)]


def kill_after_a_commit(command: list[str], service: ServedHoldfast, client: Client, run: str, log: Path) -> None:
    with log.open("wb") as output:
        launch = subprocess.Popen(command, env=environment(service), stdout=output, stderr=subprocess.STDOUT)
    family = [psutil.Process(launch.pid)]
    try:
        deadline = time.monotonic() + 300
        while not committed(client, run):
            assert launch.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
    finally:
        family[0].suspend()
        family += family[0].children(recursive=True)  # torchrun's workers have sessions of their own
        for process in family:
            process.send_signal(signal.SIGKILL)
        launch.wait()


def committed(client: Client, run: str) -> bool:
    project, _, name = run.partition("/")
    if project not in {each.name for each in client.projects.all()}:
        return False
    return any(each.name == name and each.committed_checkpoints for each in client.runs.all(project))


def environment(service: ServedHoldfast) -> dict[str, str]:
    # A killed torchrun leaves temporary folders: they go where the service's are.
    temporary = {"TMPDIR": str(Path(service.environment["HOLDFAST_DATA_DIR"]).parent)}
    return without_holdfast_settings() | service.environment | temporary | {"OMP_NUM_THREADS": "1"}


def printed_steps(text: str) -> dict[int, str]:
    return {int(step): loss for step, loss in _STEP.findall(text)}


@pytest.mark.parametrize(
    ("example", "ranks", "ranks_after"),
    [
        ("plain.py", 0, 0),
        ("ddp.py", 2, 2),
        ("fsdp2.py", 2, 1),
        ("accelerate_loop.py", 0, 0),
        ("lora.py", 0, 0),
        ("lightning_fit.py", 0, 0),
    ],
    ids=["plain", "ddp", "fsdp2 from 2 ranks to 1", "accelerate", "lora", "lightning"],
)
def test_a_killed_example_goes_on(
    service: ServedHoldfast, tmp_path: Path, example: str, ranks: int, ranks_after: int
) -> None:
    run = f"examples/{example.removesuffix('.py')}-{ranks}-{ranks_after}"
    log = tmp_path / "first.log"
    with Client(ClientSettings(url=service.url, data_dir=service.environment["HOLDFAST_DATA_DIR"])) as client:
        kill_after_a_commit(command(example, ranks, run, ENDLESS), service, client, run, log)
        before = printed_steps(log.read_text())
        point = client.restores.restore_point(*run.split("/")).restore_point
        assert point is not None
        # The launch may go on from a later step: seals that the service had when the trainer died still commit.
        last_step = (max(before) // 20 + 3) * 20  # whole epochs of Lightning's example
        again = subprocess.run(
            command(example, ranks_after, run, last_step + (example not in COUNTING_FROM_ONE)),
            env=environment(service),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert again.returncode == 0, again.stderr
        after = printed_steps(again.stdout)
        committed_steps = {each.step for each in client.checkpoints.all(*run.split("/"))}
    assert point.step <= min(after) - 1 < last_step
    assert min(after) - 1 in committed_steps
    assert list(after) == list(range(min(after), last_step + 1))
    if ranks == ranks_after:
        trained_twice = before.keys() & after.keys()
        assert {step: before[step] for step in trained_twice} == {step: after[step] for step in trained_twice}


def test_the_trainer_example_runs_to_its_end(service: ServedHoldfast) -> None:
    """Once: lora.py is the same Trainer, and is killed."""
    ended = subprocess.run(
        command("hf.py", 0, "examples/hf", 25), env=environment(service), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert list(printed_steps(ended.stdout)) == list(range(1, 26))
    with Client(ClientSettings(url=service.url, data_dir=service.environment["HOLDFAST_DATA_DIR"])) as client:
        assert {each.step for each in client.checkpoints.all("examples", "hf")} == {20, 25}


def test_each_checkpoint_is_scored_once_and_the_best_one_has_a_name(service: ServedHoldfast) -> None:
    """Those that are there, those that come, and after a kill only those that have no score."""
    run = "examples/evaluated"
    project, name = run.split("/")
    settings = ClientSettings(url=service.url, data_dir=service.environment["HOLDFAST_DATA_DIR"])
    score = re.compile(r"^step (\d+) eval_loss ", flags=re.MULTILINE)

    def train(steps: int) -> list[int]:
        """The steps that are committed afterwards: a save that comes too early is left out."""
        subprocess.run(command("plain.py", 0, run, steps), env=environment(service), check=True, timeout=300)
        return sorted(each.step for each in client.checkpoints.all(project, name))

    def evaluator(*options: str) -> subprocess.Popen[str]:
        script = [sys.executable, str(EXAMPLES / "evaluate.py"), run, *options]
        return subprocess.Popen(script, env=environment(service), stdout=subprocess.PIPE, text=True)

    def scored(until_step: int) -> list[int]:
        with evaluator("--until-step", str(until_step)) as ends:
            output, _ = ends.communicate(timeout=300)
        assert ends.returncode == 0
        return [int(step) for step in score.findall(output)]

    with Client(settings) as client:
        first = train(41)
        assert scored(first[-1]) == first
        with evaluator() as follows:
            try:
                every = train(201)
                assert follows.stdout is not None
                told = [score.match(follows.stdout.readline()) for _ in every[len(first) :]]
            finally:
                follows.kill()
        assert [int(each[1]) for each in told if each] == every[len(first) :] != []
        assert scored(every[-1]) == []
        losses = {each.step: each.metrics["eval_loss"].value for each in client.checkpoints.all(project, name)}
        best = client.checkpoints.select(project, name, "best:eval_loss")
    assert sorted(losses) == every
    assert losses[best.step] == min(losses.values())
