"""One measured process: reads its spec, runs the case, prints its figures as the last line. See benchmarks/__init__.py.

python -m benchmarks.case SPEC
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import torch

from benchmarks.spec import Spec

RESULT = "RESULT "


def main() -> None:
    spec = Spec.decode(sys.argv[1])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo")
    figures = importlib.import_module(f"benchmarks.cases.{spec.case}").run(spec)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    print(RESULT + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
