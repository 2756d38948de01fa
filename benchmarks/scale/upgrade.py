"""The rate of saves before, during and after a migration, and during a backup, in a catalog of many checkpoints.

python -m benchmarks.scale.upgrade [--checkpoints 1000000] [--savers 4] [--rate 0] [--seconds 30] [--results FOLDER]

The migration is two later revisions (tests/support/trial_revision.py): a column of the table of checkpoints, and an
index over all of its rows, made concurrently. Each saver is one job on one connection, and saves a small checkpoint
after the other, or at a rate: jobs that train between their saves leave the cores time. A save counts for the part in
which it ended. All is on this machine, so savers, service, Postgres and the migration share its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from tests.support.rank import Job
from tests.support.trial_revision import COLUMN, INDEX, later_revisions

from benchmarks.scale.catalog import project_of
from benchmarks.scale.storm import PROJECTS, Cluster, cluster
from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION
from holdfast_service.backup.write import write_backup
from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import upgrade

_RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass
class Saves:
    """`ended`: when each save ended and how long it took, in the order of their ends. Monotonic seconds."""

    ended: list[tuple[float, float]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def between(self, began: float, until: float) -> dict[str, float]:
        took = sorted(seconds for at, seconds in self.ended if began < at <= until)
        figures = {"seconds": round(until - began, 2), "saves": len(took), "saves_a_second": 0.0}
        if took:
            slow = took[ceil(0.99 * len(took)) - 1]
            figures |= {
                "saves_a_second": round(len(took) / (until - began), 2),
                "p50_ms": round(median(took) * 1000, 1),
                "p99_ms": round(slow * 1000, 1),
                "slowest_ms": round(took[-1] * 1000, 1),
            }
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=1_000_000, help="in the catalog before")
    parser.add_argument("--savers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.0, help="saves a second of all; 0: as many as there can be")
    parser.add_argument("--seconds", type=float, default=30.0, help="of saves before and after")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="the folder for upgrade.json")
    arguments = parser.parse_args()
    with cluster(checkpoints=arguments.checkpoints) as started:
        parts = _measured(started, arguments.savers, arguments.rate, arguments.seconds)
    found = {
        "checkpoints": arguments.checkpoints,
        "savers": arguments.savers,
        "rate": arguments.rate,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "parts": parts,
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "upgrade.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    for name, each in parts.items():
        print(f"{name:10} " + ", ".join(f"{key} {value:g}" for key, value in each.items()))
    print(path)


def _measured(started: Cluster, savers: int, rate: float, seconds: float) -> dict[str, dict[str, float]]:
    saves, stop, pause = Saves(), threading.Event(), savers / rate if rate else 0.0
    threads = [
        threading.Thread(target=_save, args=(started, number, saves, stop, pause)) for number in range(1, savers + 1)
    ]
    database = Database(started.postgres.url_for("scale"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        stack.callback(database.dispose)
        for thread in threads:
            thread.start()
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.callback(stop.set)
        _until(lambda: len(saves.ended) >= savers or bool(saves.errors))
        stack.enter_context(later_revisions(folder, COLUMN, INDEX))
        works: dict[str, Callable[[], Any]] = {
            "before": lambda: _let_save(saves, seconds),
            "migration": lambda: upgrade(database),
            "after": lambda: _let_save(saves, seconds),
            "backup": lambda: write_backup(database, folder / "catalog.backup"),
            "at the end": lambda: _let_save(saves, seconds),
        }
        parts = {}
        for name, work in works.items():
            began = time.monotonic()
            work()
            parts[name] = saves.between(began, time.monotonic())
            if saves.errors:
                raise RuntimeError(f"a save failed in the part {name!r}") from saves.errors[0]
    return parts


def _let_save(saves: Saves, seconds: float) -> None:
    """For so long, and until a save has ended."""
    before = len(saves.ended)
    time.sleep(seconds)
    _until(lambda: len(saves.ended) > before or bool(saves.errors))


def _save(started: Cluster, number: int, saves: Saves, stop: threading.Event, pause: float) -> None:
    """`pause`: seconds from the begin of a save to that of the next, if it is over by then."""
    headers = {"Authorization": f"Bearer {started.environment['HOLDFAST_TOKEN']}", PROTOCOL_HEADER: PROTOCOL_VERSION}
    try:
        with httpx.Client(base_url=started.environment["HOLDFAST_URL"], headers=headers, timeout=300) as http:
            job = Job(http, f"{project_of(number, PROJECTS)}/saver-{number}", create=True)
            step = 0
            while not stop.is_set():
                step += 1
                began = time.monotonic()
                saved = job.save(step)
                if saved["state"] != "committed":
                    raise RuntimeError(f"step {step} is {saved['state']}")
                ended = time.monotonic()
                saves.ended.append((ended, ended - began))
                stop.wait(began + pause - ended)
    except BaseException as error:
        saves.errors.append(error)


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
