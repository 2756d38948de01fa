"""`make bench`: measures, writes latest.json, draws the plot, prints the table. See benchmarks/__init__.py.

A run that leaves something out (--without-peers, --only-posix) writes partial.json, and leaves latest.json as it is:
the recorded figures would be gone, and they cannot stand beside those of another run, because a ratio is of one run.

python -m benchmarks.run [--size 1GiB] [--repeats 5] [--without-peers] [--only-posix] [--results FOLDER] [--device cuda]
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.report import table, write_json
from benchmarks.rows import Row, Rows
from benchmarks.schedule import Schedule

_REPOSITORY = Path(__file__).resolve().parents[1]
_PEERS = _REPOSITORY / ".venv-bench"
RESULTS = _REPOSITORY / "benchmarks" / "results"
_UNITS = {"MiB": 1024**2, "GiB": 1024**3}


def main() -> None:
    arguments = _arguments()
    if arguments.device == "cuda":
        _on_gpu(arguments)
        return
    peers = None if arguments.without_peers else _peers_python()
    began = time.monotonic()
    schedule = Schedule(arguments.size, arguments.repeats, peers, with_s3=not arguments.only_posix, say=_say)
    measures = schedule.take_measures()
    rows = [*Rows(measures).all(), machine(arguments.size, arguments.repeats)]
    results: Path = arguments.results
    is_partial = peers is None or arguments.only_posix
    written = results / ("partial.json" if is_partial else "latest.json")
    write_json(rows, written)
    print(table(rows))
    if not is_partial:
        pictures = [
            results / "latest.png",
            *([_REPOSITORY / "docs" / "performance.png"] if results == RESULTS else []),
        ]
        plot = [str(peers), "-m", "benchmarks.plot", str(written), *map(str, pictures)]
        subprocess.run(plot, cwd=_REPOSITORY, check=True)
    kept = f"; {results / 'latest.json'} is as it was, because something was left out" if is_partial else ""
    _say(f"{written}, after {time.monotonic() - began:.0f} s{kept}")


def _on_gpu(arguments: argparse.Namespace) -> None:
    """Writes gpu.json, and neither latest.json nor its plot: those are of a state in host memory."""
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: this machine, or this torch, has no GPU")
    began = time.monotonic()
    # The peers are torch's own, so they need no other environment.
    schedule = Schedule(arguments.size, arguments.repeats, Path(sys.executable), with_s3=False, say=_say, device="cuda")
    gpu = f"; {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    rows = [*Rows(schedule.take_gpu_measures()).gpu(), machine(arguments.size, arguments.repeats, gpu)]
    write_json(rows, arguments.results / "gpu.json")
    print(table(rows))
    _say(f"{arguments.results / 'gpu.json'}, after {time.monotonic() - began:.0f} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=size_bytes, default=size_bytes("1GiB"), help="bytes of state, for example 64MiB")
    parser.add_argument("--repeats", type=int, default=5, help="the figures are the medians of so many")
    parser.add_argument("--without-peers", action="store_true", help="Holdfast and the raw ceilings only")
    parser.add_argument("--only-posix", action="store_true", help="without SeaweedFS")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for what is written")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where the state is; cuda writes gpu.json alone"
    )
    return parser.parse_args()


def size_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+) ?(MiB|GiB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it like 64MiB or 1GiB")
    return int(match[1]) * _UNITS[match[2]]


def _peers_python() -> Path:
    subprocess.run([str(_REPOSITORY / "benchmarks" / "prepare-peers"), sys.executable, str(_PEERS)], check=True)
    return _PEERS / "bin" / "python"


def machine(size_bytes: int, repeats: int, gpu: str = "") -> Row:
    """The last row: where, when and with what, and how busy the machine was besides."""
    load = os.getloadavg()[2]
    cores = len(os.sched_getaffinity(0))
    how = (
        f"state of {size_bytes / 1024**2:.0f} MiB, medians of {repeats}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; "
        f"{_processor()}, {cores} cores; Python {platform.python_version()}, torch {torch.__version__}{gpu}"
    )
    return Row("machine: load average of 15 minutes", load, "processes", "lower", None, None, None, how)


def _processor() -> str:
    models = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return models[0] if models else platform.machine()


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
