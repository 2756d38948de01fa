"""What is measured, in which order: all subjects by turns, as often as asked, each with servers of its own.

    take_measures -> {label: [figures of each repeat]}; rows.py makes figures of bars out of them

A peer that has several ways (thread counts) shows them all in the first repeat, and its best in the others.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.peer_memory import peer_restore
from benchmarks.processes import Failed, Figures, measured
from benchmarks.servers import Place, Servers, servers
from benchmarks.spec import Spec

Measures = dict[str, list[Figures | Failed]]
"""By label. A peer's label may end in ` x4`: its way with 4 threads."""


@dataclass(frozen=True)
class Subject:
    label: str
    place: Place
    save: str
    restore: str | None = None
    rounds: int = 1
    ranks: int = 1
    agent: bool = False
    """With the agent of a node."""
    threads: tuple[int, ...] = ()
    """The ways to try; none where it has no such setting."""
    in_a_bar: bool = True
    """Measured in each repeat; the others stand beside it for comparison and are measured in the first one only."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_peer(self) -> bool:
        return self.save in {"dcp_save", "torch_boto3"}


_CONNECTOR = {"storage": "s3torchconnector"}
_FILES = {"storage": "files"}
_SMALLEST_OF_WORTH = 64 * 1024 * 1024
"""Of a smaller state no figure is of any worth. It shows that the benchmark runs, and a round of each shows that."""
_FAST = 3
"""Rounds of what takes a second or two: their median steadies a repeat's figure."""

CEILING = Subject("copy, SHA-256 and files", "files", "ceiling", rounds=_FAST)
POSIX = (
    Subject("memcpy", "files", "raw_copy", rounds=_FAST),
    CEILING,
    Subject("posix holdfast", "holdfast-posix", "holdfast_save", "holdfast_restore", rounds=_FAST),
    Subject("posix dcp.save", "files", "dcp_save", "dcp_restore", rounds=_FAST, threads=(1, 2, 4), options=_FILES),
    Subject(
        "posix dcp.async_save", "files", "dcp_save", rounds=_FAST, options=_FILES | {"mode": "async"}, in_a_bar=False
    ),
    Subject(
        "posix dcp.async_save, stager kept", "files", "dcp_save", rounds=_FAST, options=_FILES | {"mode": "stager"}
    ),
)
KEPT = Subject(
    "s3 holdfast, state kept by the node agent",
    "holdfast-s3",
    "holdfast_save",
    "holdfast_restore",
    agent=True,
    options={"relaunched": True},
)
S3 = (
    Subject("s3 bare", "s3", "raw_s3"),
    Subject("s3 holdfast", "holdfast-s3", "holdfast_save", "holdfast_restore"),
    KEPT,
    Subject("s3 bare, SHA-256 checked by the server", "s3", "raw_s3", options={"checksum": True}, in_a_bar=False),
    Subject("s3 s3torchconnector", "s3", "dcp_save", "dcp_restore", threads=(1, 2, 4, 8), options=_CONNECTOR),
    Subject("s3 torch.save + boto3", "s3", "torch_boto3", "torch_boto3", in_a_bar=False),
    Subject("s3 dcp with s3fs", "s3", "dcp_save", "dcp_restore", options={"storage": "s3fs"}, in_a_bar=False),
)
OVERLAPPED = Subject(
    "posix holdfast, overlap", "holdfast-posix", "holdfast_save", rounds=_FAST, options={"overlap": True}
)
PEER_RESTORE = "restore of a lost host from the memory of another one"
GPU = (
    Subject("bare pinned copy", "files", "pinned_copy", rounds=_FAST),
    *POSIX[2:4],
    replace(POSIX[4], in_a_bar=True),
    POSIX[5],
    OVERLAPPED,
)
STREAMED = Subject(
    "posix holdfast, streamed", "holdfast-posix", "holdfast_save", "holdfast_restore", options={"stream": True}
)
BOUNDED = "posix holdfast, host_memory of 192 MiB"
ONCE = (
    OVERLAPPED,
    STREAMED,
    Subject(BOUNDED, "holdfast-posix", "holdfast_save", rounds=_FAST, options={"host_memory": 192 * 1024 * 1024}),
    Subject("frozen holdfast", "holdfast-posix", "holdfast_save", options={"frozen": True}),
    Subject("frozen holdfast, declared", "holdfast-posix", "holdfast_save", options={"frozen": True, "declared": True}),
    Subject("frozen dcp.save", "files", "dcp_save", options=_FILES | {"frozen": True}),
)
"""Counted, and timed only by the way."""
COMPRESSION = "compression of trained states"
TRAINING = "training, "
TRAINING_WITH_AGENT = "training with an agent, "
"""And the place of the save that is in flight."""
TRAINING_COMPRESSED = "training while a save is compressed"
TWO_RANKS = (
    Subject("2 ranks posix holdfast", "holdfast-posix", "holdfast_save", rounds=_FAST, ranks=2),
    Subject("2 ranks posix dcp.save", "files", "dcp_save", rounds=_FAST, ranks=2, options=_FILES),
    Subject("2 ranks s3 holdfast", "holdfast-s3", "holdfast_save", ranks=2),
    Subject("2 ranks s3 s3torchconnector", "s3", "dcp_save", ranks=2, options=_CONNECTOR),
)


@dataclass
class Schedule:
    """`peers`: the interpreter of their environment, or None to leave them out; `with_s3`: SeaweedFS as well; `device`:
    of the state."""

    size_bytes: int
    repeats: int
    peers: Path | None
    with_s3: bool
    say: Callable[[str], None]
    device: str = "cpu"
    measures: Measures = field(default_factory=lambda: defaultdict(list))
    _best: dict[str, int] = field(default_factory=dict)

    def take_measures(self) -> Measures:
        for repeat in range(self.repeats):
            self.say(f"repeat {repeat + 1} of {self.repeats}")
            for subject in self._wanted(POSIX + S3):
                if subject.in_a_bar or repeat == 0:
                    self._measure(subject)
        self.say("once: copies beside training, what is streamed, bounded, frozen, two ranks, training during a save")
        for subject in self._wanted(ONCE + TWO_RANKS):
            self._measure(subject)
        self._measure_compression()
        self._measure_peer_restore()
        for place in self._training_places():
            self._measure_training(f"{TRAINING}{place}", place)
            self._measure_training(f"{TRAINING_WITH_AGENT}{place}", place, agent=True)
        self._measure_training(TRAINING_COMPRESSED, "holdfast-posix", HOLDFAST_COMPRESS="zstd")
        return dict(self.measures)

    def take_gpu_measures(self) -> Measures:
        """The state on a GPU, saved to files. The peers are torch's own, in this environment."""
        for repeat in range(self.repeats):
            self.say(f"repeat {repeat + 1} of {self.repeats}")
            for subject in self._wanted(GPU):
                self._measure(subject)
        self._measure_training(f"{TRAINING}holdfast-posix", "holdfast-posix")
        return dict(self.measures)

    def _wanted(self, subjects: tuple[Subject, ...]) -> Iterator[Subject]:
        for subject in subjects:
            if (self.with_s3 or subject.place in {"files", "holdfast-posix"}) and (self.peers or not subject.is_peer):
                yield subject

    def _measure(self, subject: Subject) -> None:
        if not subject.threads:
            self._save_and_restore(subject, subject.label)
        elif (best := self._best.get(subject.label)) is not None:
            self._save_and_restore(_with(subject, best), f"{subject.label} x{best}")
        else:
            seconds = {
                count: self._save_and_restore(_with(subject, count), f"{subject.label} x{count}")
                for count in subject.threads
            }
            self._best[subject.label] = min(seconds, key=lambda count: seconds[count])

    def _save_and_restore(self, subject: Subject, label: str) -> float:
        """The save's seconds; infinite where it could not be measured."""
        python = self.peers if subject.is_peer and self.peers else Path(sys.executable)
        with servers(subject.place, agent=subject.agent) as started:
            spec = self._spec(subject.save, subject.rounds, started, subject.options)
            saved = self._note(label, measured(python, spec, started.environment, ranks=subject.ranks))
            if isinstance(saved, Failed):
                if subject.restore is not None:
                    self._note(f"{label}, restore", Failed(f"its save failed: {saved.why}"))
                return float("inf")
            if subject.restore is not None:
                of_saved = {"fingerprint": saved["fingerprint"], "number": saved["number"]}
                again = replace(spec, case=subject.restore, options=subject.options | of_saved)
                self._note(f"{label}, restore", measured(python, again, started.environment))
            return float(saved.get("seconds", 0.0))

    def _measure_peer_restore(self) -> None:
        with servers("holdfast-posix") as started:
            self._note(PEER_RESTORE, peer_restore(self._spec("on_host", 1, started, {}), started))

    def _measure_compression(self) -> None:
        with servers("holdfast-posix") as started:
            spec = self._spec("compression", _FAST, started, {})
            self._note(COMPRESSION, measured(Path(sys.executable), spec, started.environment))

    def _training_places(self) -> tuple[Place, ...]:
        return ("holdfast-posix", "holdfast-s3") if self.with_s3 else ("holdfast-posix",)

    def _measure_training(self, label: str, place: Place, *, agent: bool = False, **settings: str) -> None:
        first, *others = sorted(os.sched_getaffinity(0))
        if not others:
            self._note(label, Failed("this machine has one core, and none is left for a save"))
            return
        with servers(place, cores=set(others), agent=agent) as started:
            # A small state is gone in no time, and whoever takes it does not want to wait for figures of any worth.
            quiet_seconds = min(3.0, self.size_bytes / 1024**3 * 3)
            options = {"training_cores": [first], "other_cores": others, "quiet_seconds": max(0.1, quiet_seconds)}
            spec = self._spec("training", _FAST, started, options)
            self._note(label, measured(Path(sys.executable), spec, started.environment | settings))

    def _spec(self, case: str, rounds: int, started: Servers, options: dict[str, Any]) -> Spec:
        return Spec(
            case,
            self.size_bytes,
            rounds if self.size_bytes >= _SMALLEST_OF_WORTH else 1,
            str(started.folder),
            started.endpoint,
            started.bucket,
            self.device,
            started.pids,
            options,
        )

    def _note(self, label: str, figures: Figures | Failed) -> Figures | Failed:
        self.measures[label].append(figures)
        if isinstance(figures, Failed):
            self.say(f"  {label}: could not run: {figures.why}")
        elif "seconds" in figures:
            self.say(f"  {label}: {figures['bytes'] / figures['seconds'] / 1e9:.2f} GB/s")
        return figures


def _with(subject: Subject, threads: int) -> Subject:
    return replace(subject, options=subject.options | {"threads": threads})
