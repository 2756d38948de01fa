"""python -m benchmarks.cases.copy_and_hash CORE…: copies and hashes on these cores until it is killed.

It prints a line when it has begun. It imports no torch, which would take longer than the measurement beside it.
"""

from __future__ import annotations

import hashlib
import os
import sys

_BLOCK_BYTES = 64 * 1024 * 1024


def main(cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    source, target = bytes(_BLOCK_BYTES), bytearray(_BLOCK_BYTES)
    print("begun", flush=True)
    while True:
        target[:] = source
        hashlib.sha256(target)


if __name__ == "__main__":
    main({int(core) for core in sys.argv[1:]})
