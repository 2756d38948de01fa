"""`holdfast serve` or `holdfast workers run` with a wall clock that can jump: python -m tests.chaos_run.serve
[workers run]"""

from __future__ import annotations

import sys

import holdfast_service.cli
import holdfast_service.serve  # noqa: F401  # the clock jumps for what is imported
from holdfast_client.cli.main import main
from tests.chaos_run.clock import follow_clock

if __name__ == "__main__":
    follow_clock()
    sys.argv = ["holdfast", *(sys.argv[1:] or ["serve"])]
    main()
