"""An import holds some chunks, whatever the size of its source: also what is mapped of a file counts. One that is cut
short meanwhile ends it, and that is told."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from holdfast_client import Client
from holdfast_protocol.runs import EditProject
from tests.support.serve import HOLDFAST, ServedHoldfast, holdfast_serve

MIB = 1024**2
SOURCE_MIB = 900
MOST_MIB = 286
"""Above what the import of a tiny file takes in the same process: 300 MB. With two hashing threads on a machine that
swaps nothing it is about 210 MiB."""

CUT_SHORT = """
import os
import resource
import sys
from holdfast.imports import steps
from holdfast_client.cli.main import main

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
opened = steps._Import._opened

def opened_on_a_file_that_is_cut_short(self):
    os.truncate(sys.argv[2], 0)
    return opened(self)

steps._Import._opened = opened_on_a_file_that_is_cut_short
main()
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHoldfast]:
    with holdfast_serve(tmp_path_factory.mktemp("service")) as running:
        yield running


def write_torch(state: dict[str, torch.Tensor], path: Path) -> Path:
    torch.save(state, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def write_safetensors(state: dict[str, torch.Tensor], path: Path) -> Path:
    save_file(state, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def write_dcp(state: dict[str, torch.Tensor], path: Path) -> Path:
    dcp.save({"model": state}, checkpoint_id=path, no_dist=True)
    return path


def random_bytes(mib: int) -> torch.Tensor:
    """No two chunks are alike, and none can be left out."""
    return torch.randint(2**62, (mib * MIB // 8,), dtype=torch.int64)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's peak of a process is read from /proc")
@pytest.mark.parametrize("write", [write_torch, write_safetensors, write_dcp], ids=["torch", "safetensors", "dcp"])
def test_an_import_of_a_large_source_takes_the_memory_of_some_chunks(
    write: Callable[[dict[str, torch.Tensor], Path], Path],
    served: ServedHoldfast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = write({"w": torch.ones(3)}, tmp_path / "small")
    state = {"wide": random_bytes(SOURCE_MIB - 300), "other": random_bytes(200)}
    large = write(state | {f"narrow{n}": random_bytes(4) for n in range(25)}, tmp_path / "large")
    del state
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)
    with Client() as client:
        client.projects.edit("tests", EditProject())
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.import_peak", small, large, f"tests/{large.stem}-{write.__name__[6:]}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, grown = done.stdout.splitlines()[-1].split()
    assert int(grown) < MOST_MIB


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other signals for it")
def test_a_source_that_is_cut_short_ends_the_import_which_says_so_and_goes_on_with_the_whole_source(
    served: ServedHoldfast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)
    with Client() as client:
        client.projects.edit("tests", EditProject())
    source = write_safetensors({"w": torch.ones(100_000)}, tmp_path / "gpt")
    command = ["import", str(source), "tests/cut-short@1"]
    cut = subprocess.run([sys.executable, "-c", CUT_SHORT, *command], capture_output=True, text=True, check=False)
    assert cut.returncode == -signal.SIGBUS, cut.stderr
    assert "Bus error" in cut.stderr
    write_safetensors({"w": torch.ones(100_000)}, tmp_path / "gpt")
    again = subprocess.run([HOLDFAST, *command], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "1 step imported" in again.stdout
