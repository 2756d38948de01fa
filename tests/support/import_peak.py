"""Two imports in one process, and by how many MiB the second one raised its peak of memory:
`python -m tests.support.import_peak SMALL LARGE RUN`. The first one brings the modules, threads and connections in.
"""

from __future__ import annotations

import sys

from holdfast_client.cli.main import main


def peak_mib() -> int:
    """The most memory that the process has had so far, mapped files included, as Linux counts it."""
    with open("/proc/self/status", encoding="ascii") as file:
        status = dict(line.split(":", 1) for line in file)
    return int(status["VmHWM"].split()[0]) // 1024


def bring(source: str, target: str) -> None:
    sys.argv = ["holdfast", "import", source, target, "--create"]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise


if __name__ == "__main__":
    small, large, run = sys.argv[1:]
    bring(small, f"{run}-floor@1")
    floor = peak_mib()
    bring(large, f"{run}@1")
    print(floor, peak_mib() - floor)
