"""How much memory an import of a large source takes, and how long it takes.

python -m benchmarks.import_memory [--gb 10] [--folder /tmp]

Writes a safetensors file of random bytes (no chunk of it is like another, and none is a hole), imports it into a posix
store of a `holdfast serve` of this machine, and prints the peak of the importing process above what it had after it had
imported a tiny file. That peak counts the mapped pages of the source too. Source and store lie below --folder, which
needs twice the size, and are removed at the end. In the source are one tensor of a tenth of it, some of the size of an
embedding or a layer, and many small ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tests.support.serve import holdfast_serve

_GB = 10**9
_BLOCK_BYTES = 16 * 1024**2
_LAYER_BYTES = 134 * 10**6
_SMALL_BYTES = 16 * 1024
_SMALL_PER_LAYER = 10
_SPARE = 2.2
"""Source and store, and what the service has beside them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=10)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    size = int(arguments.gb * _GB)
    if (free := shutil.disk_usage(arguments.folder).free) < size * _SPARE:
        sys.exit(f"{arguments.folder} has {free / _GB:.1f} GB free, and {size * _SPARE / _GB:.1f} GB are needed.")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        folder = Path(work)
        small, large = folder / "small.safetensors", folder / "large.safetensors"
        _write(small, [_SMALL_BYTES])
        _write(large, list(_sizes(size)))
        with holdfast_serve(folder, forked=False) as served:
            began = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "tests.support.import_peak", small, large, "bench/import"],
                env=os.environ | served.environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            seconds = time.monotonic() - began
    print(done.stdout)
    floor, grown = map(int, done.stdout.splitlines()[-1].split())
    print(
        f"{size / _GB:.1f} GB: the peak was {grown} MiB ({grown * 1024**2 / 10**6:.0f} MB) above the {floor} MiB after "
        f"a tiny import; {seconds:.0f} s with the comparison"
    )


def _sizes(total: int) -> Iterator[int]:
    """Of the tensors, in bytes."""
    yield total // 10
    left = total - total // 10
    while left > 0:
        yield min(left, _LAYER_BYTES)
        left -= _LAYER_BYTES
        yield from [_SMALL_BYTES] * _SMALL_PER_LAYER


def _write(path: Path, sizes: list[int]) -> None:
    """A block at a time: the file may be larger than the memory of the machine."""
    header: dict[str, object] = {}
    at = 0
    for number, size in enumerate(sizes):
        header[f"t{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    random = np.random.Generator(np.random.SFC64(1))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while at > 0:
            file.write(random.bytes(min(at, _BLOCK_BYTES)))
            at -= _BLOCK_BYTES


if __name__ == "__main__":
    main()
