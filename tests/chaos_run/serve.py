"""`holdfast serve` with a wall clock that can be made to jump: python -m tests.chaos_run.serve"""

from __future__ import annotations

import sys

import holdfast_service.serve
import holdfast_service.stores.s3  # loaded later by itself, when a URL names such a store  # noqa: F401
from holdfast_client.cli.main import main
from tests.chaos_run.clock import follow_clock

if __name__ == "__main__":
    follow_clock()
    sys.argv = ["holdfast", "serve"]
    main()
