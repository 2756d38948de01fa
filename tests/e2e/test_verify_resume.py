"""`holdfast verify-resume`: it passes what resumes exactly, and names what a script forgets.

The forgetful scripts start with torch imported (tests/support/warm_python.py); the demo is launched as anybody would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.verify.diagnosis import Piece
from holdfast.verify.launching import LaunchFailed
from holdfast.verify.report import as_text
from holdfast.verify.verification import Verdict, Verification, Verifier
from tests.support.serve import HOLDFAST, ServedHoldfast, holdfast_serve, without_holdfast_settings
from tests.support.warm_python import WarmPython

JOB = Path(__file__).with_name("forgetful") / "job.py"
DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "train.py"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hf-", ignore_cleanup_errors=True) as made:  # a socket's path is short
        yield Path(made)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[ServedHoldfast]:
    with holdfast_serve(folder) as running:
        yield running


@pytest.fixture(scope="module")
def warm(folder: Path) -> Iterator[WarmPython]:
    with WarmPython(folder) as running:
        yield running


def verify(
    served: ServedHoldfast, warm: WarmPython, folder: Path, forgets: str, *, steps: int = 5, kill_after: int = 3
) -> Verification:
    environment = without_holdfast_settings() | served.environment
    verifier = Verifier(warm.command(JOB, forgets), folder, environment, timeout_seconds=120, say=lambda _: None)
    return verifier.verify(steps, kill_after)


@pytest.mark.rule("bit-exact-resume")
def test_a_script_that_forgets_nothing_is_exact(served: ServedHoldfast, warm: WarmPython, tmp_path: Path) -> None:
    found = verify(served, warm, tmp_path, "nothing", steps=6)
    assert found.verdict is Verdict.EXACT, as_text(found)
    assert found.comparison.compared_steps == [3, 4, 5]
    assert "EXACT: killed after step 2" in as_text(found)
    assert found.metrics == ["loss"]


@pytest.mark.rule("bit-exact-resume")
@pytest.mark.parametrize(
    ("forgets", "piece", "name"),
    [
        ("sampler", Piece.DATA, "y"),
        ("rng", Piece.RNG, "noise.generator"),
        ("scheduler", Piece.SCHEDULER, "scheduler"),
        ("scaler", Piece.SCALER, "scaler"),
        ("ema", Piece.MODEL, "ema"),
        ("optimizer", Piece.OPTIMIZER, "optimizer"),
        ("reseed", Piece.RNG, "torch"),
    ],
)
def test_what_a_script_forgets_is_named(
    served: ServedHoldfast, warm: WarmPython, tmp_path: Path, forgets: str, piece: Piece, name: str
) -> None:
    found = verify(served, warm, tmp_path, forgets)
    assert found.verdict is Verdict.NOT_EXACT, as_text(found)
    assert found.comparison.step == 3, "the first step after the kill"
    assert (found.causes[0].piece, found.causes[0].name) == (piece, name), as_text(found)
    assert all(cause.piece is piece for cause in found.causes), as_text(found)
    assert name in as_text(found)


def test_a_script_that_does_not_repeat_itself_is_not_accused_of_forgetting(
    served: ServedHoldfast, warm: WarmPython, tmp_path: Path
) -> None:
    found = verify(served, warm, tmp_path, "seed")
    assert found.verdict is Verdict.NOT_DETERMINISTIC
    assert (found.comparison.step, found.causes) == (0, [])


def test_a_script_that_fails_is_told_by_its_last_words(
    served: ServedHoldfast, warm: WarmPython, tmp_path: Path
) -> None:
    environment = without_holdfast_settings() | served.environment
    verifier = Verifier(warm.command(JOB), tmp_path, environment, timeout_seconds=120, say=lambda _: None)
    with pytest.raises(LaunchFailed, match="IndexError: list index out of range"):
        verifier.verify(5, 3)


def test_a_verification_that_is_ended_leaves_nothing_behind(warm: WarmPython, folder: Path) -> None:
    """Neither its service, nor the launch, which waits for nobody."""
    work, temporary = folder / "ended", folder / "t"
    temporary.mkdir()
    verification = subprocess.Popen(
        [HOLDFAST, "verify-resume", "--folder", str(work), "--", *warm.command(JOB, "end")],
        env=without_holdfast_settings() | {"TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    deadline = time.monotonic() + 120
    while not list(work.glob("launches/straight/began-0.json")):
        assert verification.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    verification.terminate()
    output, _ = verification.communicate(timeout=120)
    assert verification.returncode == 128 + signal.SIGTERM, output
    left = [each.info["cmdline"] for each in psutil.process_iter(["cmdline", "environ"]) if _is_of(each, temporary)]
    assert left == []


def _is_of(process: psutil.Process, temporary: Path) -> bool:
    try:
        belongs = (process.info["environ"] or {}).get("TMPDIR") == str(temporary)
        return belongs and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_the_demo_resumes_exactly_and_nothing_is_left_behind(tmp_path: Path) -> None:
    """By the command, under torchrun on two ranks, with the service that it starts itself."""
    (tmp_path / "tmp").mkdir()
    script = [
        str(DEMO),
        "demo/gpt",
        "--save-every=1000",
        f"--journal={tmp_path / 'journal'}",
        "--width=64",
        "--layers=1",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run(
        [HOLDFAST, "verify-resume", "--steps=3", "--kill-at=2", "--json", "--", *torchrun, *script],
        env=without_holdfast_settings() | {"TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    assert (found["verdict"], found["ranks"], found["saved_step"]) == ("exact", 2, 1)
    assert found["compared_steps"] == [2]
    assert found["tensors"] > 10
    assert not [name for name in os.listdir(tmp_path / "tmp") if name.startswith("holdfast-verify-")]
