"""`make siege`: the rate of saves without and with an attack, by turns; writes siege.json and prints lines. See
benchmarks/siege/__init__.py.

python -m benchmarks.siege [--connections 10000] [--saves 100] [--repeats 7] [--greedy-per-second 10]
    [--flood-per-second 100] [--savers 4] [--rate 0] [--results FOLDER]

With --rate the savers are jobs that train between their saves. Without it they ask for all that the service can do, and
what the attack takes of it is missing. A run in which one kind of attack was not there is refused as not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.siege.attack import possible_connections
from benchmarks.siege.siege import (
    BAR,
    FLOOD_PER_SECOND,
    GREEDY_PER_SECOND,
    SAVERS,
    SETTINGS,
    Besieged,
    besieged,
    unsent,
)
from holdfast_service.settings import ServiceSettings

_PLACES = ServiceSettings().most_connections
_BURST_SECONDS = ServiceSettings().token_burst_seconds
_READY_SECONDS, _LATER_SECONDS = 300, 30
_RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def main() -> None:
    arguments = _arguments()
    connections = possible_connections(arguments.connections)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-siege-") as folder,
        besieged(Path(folder), arguments.greedy_per_second or None, arguments.savers, arguments.rate) as place,
    ):
        each = arguments.saves // arguments.savers
        place.save(each)  # a first round warms the service up
        turns = [_turn(place, connections, arguments.flood_per_second, each) for _ in range(arguments.repeats)]
    missing = sorted({kind for turn in turns for kind in unsent(turn["halves_open"], turn["counted_meanwhile"])})
    if missing:
        sys.exit(f"not measured, because these attacks were not there in some turn: {', '.join(missing)}")
    ratios = [turn["saves_per_second_attacked"] / turn["saves_per_second"] for turn in turns]
    kept = round(median(ratios), 3)
    verdict = "met" if kept >= BAR else "missed"
    found = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "settings": SETTINGS,
        "greedy_calls_per_second": arguments.greedy_per_second,
        "flood_per_second": arguments.flood_per_second,
        "connections": connections,
        "savers": arguments.savers,
        "rate": arguments.rate,
        "turns": turns,
        "kept_of_the_rate": kept,
        "bar": BAR,
        "verdict": verdict,
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "siege.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(f"kept {kept:.0%} of the rate (of each turn: {', '.join(f'{r:.0%}' for r in ratios)})")
    print(f"wanted >= {BAR:.0%}: {verdict}")
    print(path)


def _turn(place: Besieged, connections: int, flood_per_second: float, each: int) -> dict[str, Any]:
    before = place.save(each)
    with place.attacked(connections, flood_per_second) as attackers:
        # Once all are there, and the greedy token has spent what it may do at once.
        attackers.until(
            lambda counted: (
                counted.get("halves opened", 0) >= connections
                and counted.get("halves cut off", 0) >= connections - _PLACES
                and counted.get("greedy 200", 0) >= GREEDY_PER_SECOND * _BURST_SECONDS
            ),
            _READY_SECONDS,
        )
        began = dict(attackers.counted)
        during = place.save(each)
        # Refusals are held for some seconds, and may come just behind a short round of saves.
        attackers.until(
            lambda counted: counted != began and not unsent(counted["halves open"], _since(began, counted)),
            _LATER_SECONDS,
        )
        counted = _since(began, attackers.counted)
        open_now, halves = place.connections(), attackers.counted["halves open"]
    print(f"{before.per_second:.1f} saves/s, attacked {during.per_second:.1f}; meanwhile {counted}", flush=True)
    return {
        "saves_per_second": round(before.per_second, 2),
        "saves_per_second_attacked": round(during.per_second, 2),
        "saves": len(during.ids),
        "seconds": round(before.seconds, 2),
        "seconds_attacked": round(during.seconds, 2),
        "cpu_seconds": before.cpu_seconds,
        "cpu_seconds_attacked": during.cpu_seconds,
        "connections_at_the_service": open_now,
        "halves_open": halves,
        "counted_meanwhile": counted,
    }


def _since(began: dict[str, int], counted: dict[str, int]) -> dict[str, int]:
    return {name: count - began.get(name, 0) for name, count in counted.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--saves", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--greedy-per-second", type=float, default=GREEDY_PER_SECOND, help="its limit; 0: none")
    parser.add_argument("--flood-per-second", type=float, default=FLOOD_PER_SECOND, help="wrong tokens that hang up")
    parser.add_argument("--savers", type=int, default=SAVERS, help="jobs that save one after the other")
    parser.add_argument("--rate", type=float, default=0.0, help="saves a second of all; 0: as many as there can be")
    parser.add_argument("--results", type=Path, default=_RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
