"""How long a diff of two checkpoints with many tensors takes: the REST call, the comparison in Python, the command.

python -m benchmarks.diff [--tensors 10000] [--repeats 5] [--database sqlite|postgres] [--profile]

Two checkpoints are saved by the SDK, to a `holdfast serve` of this machine. Half of the tensors have chunks of their
own, and every third one is another in the second checkpoint. Each figure is the median of the repeats, with all of them
behind it. --profile prints where the comparison in Python spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from tests.support.serve import HOLDFAST, holdfast_serve
from torch import nn

import holdfast
from holdfast_client.client import Client
from holdfast_client.comparison import compare

_RUN = "bench/gpt"
_SIZES = holdfast.ChunkSizes(own_chunk_bytes=16 * 1024, pack_bytes=1024**2, cut_bytes=1024**2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with holdfast_serve(Path(folder), database=arguments.database, forked=False) as served:
            os.environ.update(served.environment)
            _save(arguments.tensors)
            _measure(arguments.repeats, profiled=arguments.profile)


def _save(tensors: int) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [(512, 4096)[number % 2] for number in range(tensors)]
    state = {f"layers.{n // 16}.part{n % 16}": torch.randn(size, generator=generator) for n, size in enumerate(sizes)}
    with holdfast.Checkpointer(_RUN, create=True, chunk_sizes=_SIZES) as ckpt:
        ckpt.restore({})
        for step in (1, 2):
            model = nn.Module()
            for name, value in state.items():
                model.register_buffer(name.replace(".", "_"), value)
            ckpt.save(step, {"model": model}).committed.result(timeout=600)
            state = {name: value + (number % 3 == 0) for number, (name, value) in enumerate(state.items())}


def _measure(repeats: int, *, profiled: bool) -> None:
    with Client() as client:
        project, run = _RUN.split("/")
        before, after = (client.checkpoints.select(project, run, str(step)).id for step in (1, 2))
        found = compare(client, before, after)
        kinds = {kind: len(getattr(found.tensors, kind)) for kind in type(found.tensors).model_fields}
        print(
            f"{sum(kinds.values())} tensors: {', '.join(f'{count} {kind}' for kind, count in kinds.items() if count)}"
        )
        _time("REST, what the catalog knows", repeats, lambda: client.checkpoints.diff(before, after))
        _time("Python: with the tensors", repeats, lambda: compare(client, before, after))
        command = [HOLDFAST, "checkpoints", "diff", f"{_RUN}@1", f"{_RUN}@2"]
        for more in ([], ["--json"]):
            ran = [*command, *more]
            _time(" ".join(["holdfast", *ran[1:]]), repeats, lambda ran=ran: _run(ran))
        if profiled:
            profile = cProfile.Profile()
            profile.runcall(compare, client, before, after)
            pstats.Stats(profile).sort_stats("cumulative").print_stats(30)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _time(name: str, repeats: int, call: Callable[[], object]) -> None:
    seconds = []
    for _ in range(repeats):
        began = time.monotonic()
        call()
        seconds.append(time.monotonic() - began)
    print(f"{name}: {median(seconds):.2f} s ({', '.join(f'{each:.2f}' for each in seconds)})", flush=True)


if __name__ == "__main__":
    main()
