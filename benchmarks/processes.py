"""Runs one case in a process of its own, or one per rank, and brings its figures back. A failure is an answer too."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.forked import ForkedProgram
from tests.support.ports import free_ports
from tests.support.serve import without_holdfast_settings

from benchmarks.case import RESULT
from benchmarks.spec import Spec

REPOSITORY = Path(__file__).resolve().parents[1]
_LONGEST_SECONDS = 600


@dataclass(frozen=True)
class Failed:
    """The case could not be measured; `why` is one line."""

    why: str


Figures = dict[str, Any]


def measured(python: Path, spec: Spec, environment: Mapping[str, str], *, ranks: int = 1) -> Figures | Failed:
    """Several ranks: rank 0's figures, with the CPU seconds of all."""
    together = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
    with TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(ranks)]
        processes = [
            start(
                python,
                spec,
                without_holdfast_settings() | environment | (together | {"RANK": str(rank)} if ranks > 1 else {}),
                log,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            for process in processes:
                process.wait(timeout=_LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            return Failed(f"not over within {_LONGEST_SECONDS} s")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        outputs = [log.read_text(errors="replace") for log in logs]
    found = [_figures(output) for output in outputs]
    for process, figures, output in zip(processes, found, outputs, strict=True):
        if process.returncode != 0 or figures is None:
            return Failed(_last_line(output) or f"ended with {process.returncode}")
    of_ranks = [figures for figures in found if figures is not None]
    added = {name: sum(figures[name] for figures in of_ranks) for name in ("cpu_seconds",) if name in of_ranks[0]}
    return of_ranks[0] | added


def start(
    python: Path, spec: Spec, environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes] | ForkedProgram:
    """The case as a process of its own, which writes all it says to `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(python), "-m", "benchmarks.case", spec.encode()],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _figures(output: str) -> Figures | None:
    lines = [line for line in output.splitlines() if line.startswith(RESULT)]
    return json.loads(lines[-1].removeprefix(RESULT)) if lines else None


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
