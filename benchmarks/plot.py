"""latest.json -> a picture: rates, the client's CPU and stalls, beside the peers'. Runs in the peers' environment.

python -m benchmarks.plot RESULTS PNG...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

_PANELS = (
    ("Save to S3, GB/s until it is durable", "s3 ", (": rate", ": PUT rate"), False),
    ("Restore from S3, GB/s", "s3 ", (", restore: rate", ": GET rate"), True),
    ("Save to tmpfs, GB/s until it is durable", "posix ", (": rate",), False),
    ("Restore from tmpfs, GB/s", "posix ", (", restore: rate",), True),
    ("The client's CPU-seconds per GB saved to S3", "s3 ", (": CPU", ": CPU of PUTs"), False),
    ("Stall of training, seconds", "posix ", (": stall",), False),
)
_OURS, _THEIRS, _RAW = "#1f5f8b", "#b8b8b8", "#dfd3b6"


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text())
    figure, grid = plt.subplots(3, 2, figsize=(13, 11), layout="constrained")
    for axes, (title, place, endings, restore) in zip(grid.flat, _PANELS, strict=True):
        bars = _bars(rows, place, endings, restore=restore)
        names = list(bars)
        axes.barh(names, [bars[name] for name in names], color=[_color(name) for name in names])
        axes.bar_label(axes.containers[0], fmt="%.2f", padding=3)
        axes.set_title(title, loc="left", fontsize=11)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    for target in sys.argv[2:]:
        figure.savefig(target, dpi=90)


def _bars(rows: list[dict[str, Any]], place: str, endings: tuple[str, ...], *, restore: bool) -> dict[str, float]:
    """Subject -> value. A bare subject reads and writes in one process, so its ending alone says which."""
    found: dict[str, float] = {}
    for row in rows:
        name, value = row["name"], row["value"]
        ending = next((ending for ending in endings if name.endswith(ending)), None)
        if ending is None or value is None or not name.startswith(place):
            continue
        if name.startswith(f"{place}bare") or (", restore" in name) == restore:
            found[name.removeprefix(place).removesuffix(ending)] = value
    return found


def _color(name: str) -> str:
    return _OURS if name.startswith("holdfast") else _RAW if name.startswith("bare") else _THEIRS


if __name__ == "__main__":
    main()
