"""What the processes of a soak write down, one line each: a line is in the file before the process can be killed behind
it, and half a line at the end of a file is what a kill left.

    shard    the content of one rank's shard, before it is sealed
    count    something that was done, for the table
    fault    something that must not happen: the soak has failed
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.soak.content import Piece

COMMITTED = "checkpoints committed"


class Ledger:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = (folder / f"ledger-{os.getpid()}-{threading.get_ident()}.jsonl").open("ab", buffering=0)
        self._lock = threading.Lock()

    def shard(self, checkpoint_id: str, rank: int, pieces: list[Piece]) -> None:
        self.write(kind="shard", checkpoint=checkpoint_id, rank=rank, pieces=[[p.seed, p.size] for p in pieces])

    def count(self, what: str, times: int = 1) -> None:
        self.write(kind="count", what=what, times=times)

    def fault(self, what: str) -> None:
        self.write(kind="fault", what=what)

    def write(self, **line: Any) -> None:
        with self._lock:
            self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        self._file.close()

    # Reading what all have written.

    def content_of(self, checkpoint_id: str) -> dict[int, list[list[Piece]]]:
        """By rank, everything that it recorded for this checkpoint: a relaunched job's rank may have begun twice."""
        found: dict[int, list[list[Piece]]] = {}
        for line in self.lines("shard"):
            if line["checkpoint"] == checkpoint_id:
                found.setdefault(line["rank"], []).append([Piece(*each) for each in line["pieces"]])
        return found

    def counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for line in self.lines("count"):
            counts[line["what"]] += line["times"]
        return counts

    def faults(self) -> list[str]:
        return [line["what"] for line in self.lines("fault")]

    def lines(self, kind: str) -> Iterator[dict[str, Any]]:
        for path in sorted(self._folder.glob("ledger-*.jsonl")):
            for text in path.read_bytes().splitlines(keepends=True):
                if text.endswith(b"\n"):
                    line = json.loads(text)
                    if line["kind"] == kind:
                        yield line
