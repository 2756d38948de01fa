"""scale.json -> a picture: storms against ranks, and calls against the catalog's size. Runs in the peers' environment.

python -m benchmarks.scale.plot SCALE.JSON PNG...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

_SAVE = ("open attempt", "begin", "negotiate", "seal", "heartbeat", "restore point", "read tickets")
_OPERATOR = ("page of runs", "usage of a project", "projects", "controllers", "/metrics", "/openapi.json")


def main() -> None:
    found = json.loads(Path(sys.argv[1]).read_text())
    storms = [row for row in found["storms"] if "failed" not in row]
    setups = [row for row in found.get("throughput", ()) if "failed" not in row]
    figure, grid = plt.subplots(3, 2, figsize=(13, 11), layout="constrained")
    _storms(grid[0, 0], storms, {"until the commit": "seconds"}, "Seconds until all ranks are committed")
    parts = {name: f"{name}_cpu_ms_a_rank" for name in ("client", "service", "database")}
    _storms(grid[0, 1], storms, parts, "CPU a rank, ms")
    _throughput(grid[1, 0], setups)
    _storms(grid[1, 1], storms, {"calls a rank": "calls_a_rank"}, "Calls a rank")
    _calls(grid[2, 0], found["calls"], _SAVE, "A job's calls, p99 in ms, against checkpoints in the catalog")
    _calls(grid[2, 1], found["calls"], _OPERATOR, "An operator's reads, p99 in ms, likewise")
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    for target in sys.argv[2:]:
        figure.savefig(target, dpi=90)


def _storms(axes: Any, rows: list[dict[str, Any]], lines: dict[str, str], title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    for name, column in lines.items():
        axes.plot([row["ranks"] for row in rows], [row[column] for row in rows], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.legend(frameon=False)


def _throughput(axes: Any, rows: list[dict[str, Any]]) -> None:
    axes.set_title("Ranks a second", loc="left", fontsize=11)
    names = [f"{row['workers']} serving{', PgBouncer' if row['pooled_connections'] else ''}" for row in rows]
    axes.barh(names, [row["ranks_a_second"] for row in rows], color="#1f5f8b")
    if rows:
        axes.bar_label(axes.containers[0], fmt="%.0f", padding=3)
    axes.invert_yaxis()


def _calls(axes: Any, by_size: dict[str, Any], names: tuple[str, ...], title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    sizes = [int(size) for size in by_size]
    for name in names:
        axes.plot(sizes, [by_size[str(size)]["calls"][name]["p99_ms"] for size in sizes], marker="o", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    main()
