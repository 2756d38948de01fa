"""Measures -> rows of latest.json: medians of the repeats, ratios of medians from the same run. Pure.

A row is {name, value, unit, better, peer, peer_value, ratio, how}. The rows of the bars come first, by the names that
the bars have; those after them are the figures they were made of. A row whose value could not be measured has null and
says why in `how`; so does one of fewer repeats than there were, because some failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from benchmarks.processes import Failed, Figures
from benchmarks.schedule import (
    BOUNDED,
    CEILING,
    COMPRESSION,
    GPU,
    KEPT,
    OVERLAPPED,
    PEER_RESTORE,
    STREAMED,
    TRAINING,
    TRAINING_COMPRESSED,
    TRAINING_WITH_AGENT,
    Measures,
)

_GB = 1e9
_MIB = 1024 * 1024
_TRAINED = {
    "fp32": "weights in fp32",
    "bf16": "the same weights, rounded to bf16",
    "adamw": "weights in fp32 with AdamW's two moments",
}


@dataclass(frozen=True)
class Row:
    name: str
    value: float | None
    unit: str
    better: Literal["lower", "higher"]
    peer: str | None
    peer_value: float | None
    ratio: float | None
    how: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Found:
    """A median, or why there is none. `why` beside a value: why it is not of all repeats."""

    value: float | None
    label: str
    why: str = ""


_OVERLAP = "overlap=True, and a step that computes for longer than the copy takes; what the optimizer waits is counted"


class Rows:
    def __init__(self, measures: Measures) -> None:
        self._measures = measures

    def all(self) -> list[Row]:
        return [
            *self._stalls(),
            *self._saves(),
            *self._restores(),
            *self._memory(),
            *self._counted(),
            *self._compression(),
            *self._details(),
        ]

    def gpu(self) -> list[Row]:
        """Of Schedule.take_gpu_measures."""
        stall = self._median("posix holdfast", _of("stall_seconds"))
        by_save, by_async, by_stager = (subject.label for subject in GPU[2:5])
        peers = {
            "pinned_copy": self._median(GPU[0].label, _of("seconds")),
            "dcp_save": self._best(by_save, _of("stall_seconds"), min),
            "dcp_async_save": self._median(by_async, _of("stall_seconds")),
            "dcp_async_save_pinned": self._median(by_stager, _of("stall_seconds")),
        }
        how = "stall of a warm save(), walking the state left out"
        overlapped = self._median(OVERLAPPED.label, _of("stall_seconds"))
        saved, written = self._median("posix holdfast", _rate), self._best(by_save, _rate, max)
        loaded = self._best(by_save, _rate, max, ", restore")
        restored = self._median("posix holdfast, restore", _rate)
        return [
            *(_ratio(f"gpu_stall_vs_{name}", stall, peer, "lower", "s", how) for name, peer in peers.items()),
            _ratio(
                "gpu_overlap_stall_vs_pinned_copy", overlapped, peers["pinned_copy"], "lower", "s", f"{how}; {_OVERLAP}"
            ),
            _ratio("gpu_save_vs_dcp_save", saved, written, "higher", "GB/s", "from save() to the commit, SHA-256 on"),
            _ratio(
                "gpu_restore_vs_dcp_load", restored, loaded, "higher", "GB/s", "in a fresh process, every byte verified"
            ),
            self._training_rate("gpu_train_rate_during_save"),
            *self._details(),
        ]

    def _stalls(self) -> list[Row]:
        stall = self._median("posix holdfast", _of("stall_seconds"))
        apart = self._median("posix holdfast", _of("state_dict_seconds")).value
        apart_text = "" if apart is None else f"; walking the state is left out: {apart * 1000:.0f} ms"
        memcpy = self._median("memcpy", _of("seconds"))
        kept = self._median("posix dcp.async_save, stager kept", _of("stall_seconds"))
        return [
            _ratio("stall_vs_memcpy", stall, memcpy, "lower", "s", f"stall of a warm save(){apart_text}"),
            _ratio("stall_vs_dcp", stall, kept, "lower", "s", f"stall of a warm save(){apart_text}"),
            _ratio(
                "overlap_stall_vs_memcpy",
                self._median(OVERLAPPED.label, _of("stall_seconds")),
                memcpy,
                "lower",
                "s",
                f"stall of a warm save(){apart_text}; {_OVERLAP}",
            ),
        ]

    def _saves(self) -> list[Row]:
        connector = self._best("s3 s3torchconnector", _rate, max)
        saved = self._median("s3 holdfast", _rate)
        checked = self._median("s3 bare, SHA-256 checked by the server", _put_rate).value
        checked_text = "" if checked is None else f"; bare PUTs whose SHA-256 the server checks: {checked:.3f} GB/s"
        return [
            _beside(
                "s3_save_cpu_s_per_gb",
                self._median("s3 holdfast", _cpu),
                self._best("s3 s3torchconnector", _cpu, min),
                "lower",
                "CPU-s/GB",
                "CPU of the client's process from save() to the commit, all threads, with SHA-256; the peer's best",
            ),
            self._s3_save_cpu_vs_parts(),
            _ratio(
                "s3_save_vs_bare_put",
                saved,
                self._median("s3 bare", _put_rate),
                "higher",
                "GB/s",
                f"from save() to the commit{checked_text}",
            ),
            _ratio("s3_save_vs_s3torchconnector", saved, connector, "higher", "GB/s", "from save() to the commit"),
            _ratio(
                "posix_save_vs_dcp",
                self._median("posix holdfast", _rate),
                self._best("posix dcp.save", _rate, max),
                "higher",
                "GB/s",
                "from save() to the commit on tmpfs, SHA-256 on",
            ),
            _ratio(
                "posix_save_vs_ceiling",
                self._median("posix holdfast", _rate),
                self._median(CEILING.label, _rate_of("save_seconds")),
                "higher",
                "GB/s",
                "from save() to the commit on tmpfs; the peer copies, hashes and writes on all cores",
            ),
        ]

    def _s3_save_cpu_vs_parts(self) -> Row:
        """CPU per GB; the parts are of two cases."""
        wire, hashed = self._median("s3 bare", _cpu_of("put_")), self._median(CEILING.label, _cpu_of("copy_and_hash_"))
        parts = None if wire.value is None or hashed.value is None else wire.value + hashed.value
        why = "; ".join(found.why for found in (wire, hashed) if found.why)
        return _ratio(
            "s3_save_cpu_vs_parts",
            self._median("s3 holdfast", _cpu),
            _Found(parts, "bare PUTs, SHA-256 and a copy", why),
            "lower",
            "CPU-s/GB",
            "CPU of the client's process from save() to the commit",
        )

    def _restores(self) -> list[Row]:
        return [
            _ratio(
                "s3_restore_vs_s3torchconnector",
                self._median("s3 holdfast, restore", _rate),
                self._best("s3 s3torchconnector", _rate, max, ", restore"),
                "higher",
                "GB/s",
                "in a fresh process, every byte verified",
            ),
            _ratio(
                "posix_restore_vs_dcp",
                self._median("posix holdfast, restore", _rate),
                self._best("posix dcp.save", _rate, max, ", restore"),
                "higher",
                "GB/s",
                "in a fresh process, every byte verified",
            ),
            _ratio(
                "posix_restore_vs_ceiling",
                self._median("posix holdfast, restore", _rate),
                self._median(CEILING.label, _rate_of("restore_seconds")),
                "higher",
                "GB/s",
                "in a fresh process; the peer reads, hashes and copies on all cores",
            ),
            _ratio(
                "peer_restore_vs_link",
                self._median(PEER_RESTORE, _rate),
                self._median(PEER_RESTORE, lambda figures: figures["link_bytes_per_second"] / _GB),
                "higher",
                "GB/s",
                "a new host's rank in a fresh process, every byte verified; the peer is the link's rate",
            ),
            _ratio(
                "streamed_restore_returns_after",
                self._median(f"{STREAMED.label}, restore", _of("returned_seconds")),
                self._median(f"{STREAMED.label}, restore", _of("seconds")),
                "lower",
                "s",
                "until restore(stream=True) returned, over all of the same restore; nothing trains beside it",
            ),
            _ratio(
                "memory_restore_vs_s3_restore",
                self._median(f"{KEPT.label}, restore", _of("seconds")),
                self._median("s3 holdfast, restore", _of("seconds")),
                "lower",
                "s",
                "in a fresh process, until its first step can run, every byte verified; from the node agent's memory",
            ),
            _beside(
                "memory_restore_seconds",
                self._median(f"{KEPT.label}, restore", _of("seconds")),
                self._median("s3 holdfast, restore", _of("seconds")),
                "lower",
                "s",
                "the same",
            ),
            _beside(
                "s3_restore_cpu_s_per_gb",
                self._median("s3 holdfast, restore", _cpu),
                self._best("s3 s3torchconnector", _cpu, min, ", restore"),
                "lower",
                "CPU-s/GB",
                "CPU of the client's process, all threads, SHA-256 and the copy into the tensors included",
            ),
        ]

    def _memory(self) -> list[Row]:
        return [
            _beside(
                "save_peak_extra_memory_ratio",
                self._median("posix holdfast", lambda figures: figures["peak_extra_bytes"] / figures["bytes"]),
                self._median(
                    "posix dcp.async_save, stager kept",
                    lambda figures: figures["peak_extra_bytes"] / figures["bytes"],
                ),
                "lower",
                "x the state",
                "the kernel's high-water mark over the process before its first save",
            ),
            _beside(
                "bounded_save_peak_extra_mib",
                self._median(BOUNDED, lambda figures: figures["peak_extra_bytes"] / _MIB),
                self._median("posix holdfast", lambda figures: figures["peak_extra_bytes"] / _MIB),
                "lower",
                "MiB",
                f"the same with host_memory of 192 MiB; save() waits for the upload then{self._bounded_stall()}",
            ),
        ]

    def _bounded_stall(self) -> str:
        stall = self._median(BOUNDED, _of("stall_seconds")).value
        return "" if stall is None else f": {stall:.2f} s"

    def _counted(self) -> list[Row]:
        return [
            _beside(
                "dedup_sent_vs_changed",
                self._median("frozen holdfast", _sent_vs_changed),
                self._median("frozen dcp.save", _sent_vs_changed),
                "lower",
                "x the bytes changed",
                "second save with 95% of the bytes frozen; counted, not timed",
            ),
            self._training_rate("train_rate_during_save"),
            self._training_with_agent(),
        ]

    def _training_with_agent(self) -> Row:
        """The lower of the stores'."""
        found = []
        for label in self._measures:
            if label.startswith(TRAINING_WITH_AGENT):
                rate, beside = (self._median(label, _of(name)) for name in ("rate", "rate_beside_hashing"))
                where = label.removeprefix(TRAINING_WITH_AGENT)
                how = f"{where}, the lower: training on a core of its own, save, agent and servers on the others"
                unit = "of its steps/s"
                found.append(_ratio("train_rate_with_agent_vs_hashing", rate, beside, "higher", unit, how))
        measured = [row for row in found if row.value is not None]
        if measured:
            return min(measured, key=lambda row: row.value or 0)
        left_out = Row("train_rate_with_agent_vs_hashing", None, "", "higher", None, None, None, "it was left out")
        return found[0] if found else left_out

    def _training_rate(self, name: str) -> Row:
        rates = [
            found
            for label in self._measures
            if label.startswith(TRAINING) and (found := self._median(label, _of("rate"))).value is not None
        ]
        quiet = "; ".join(f"{found.label.removeprefix(TRAINING)} {found.value:.3f}" for found in rates)
        worst = min((found.value for found in rates if found.value is not None), default=None)
        beside = [
            found.value
            for label in self._measures
            if label.startswith(TRAINING)
            and (found := self._median(label, _of("rate_beside_hashing"))).value is not None
        ]
        neighbour = "" if not beside else f"; beside a process that only copies and hashes {min(beside):.3f}"
        why = "; ".join(
            f"{label.removeprefix(TRAINING)}: {one.why}"
            for label, ones in self._measures.items()
            if label.startswith(TRAINING)
            for one in ones
            if isinstance(one, Failed)
        )
        failed = f"could not be measured: {why}"
        told = (
            f"the lower of: {quiet}{neighbour}; training on a core of its own, save and servers on the others"
            f"{f'; {failed}' if why else ''}"
        )
        return Row(
            name,
            worst,
            "x without a save",
            "higher",
            "no save in flight",
            1.0 if worst is not None else None,
            worst,
            failed if worst is None else told,
        )

    def _compression(self) -> list[Row]:
        """What it saves and what it costs, on states that were really trained."""
        rows = []
        steps = self._median(COMPRESSION, _of("steps")).value
        trained = "" if steps is None else f"the demo's GPT after {steps:.0f} steps; "
        for state, what in _TRAINED.items():
            ratio = self._median(COMPRESSION, _of(f"{state}_ratio"))
            how = f"{trained}{what}; bytes on the wire over the bytes of the chunks"
            rows.append(Row(f"zstd_ratio_{state}", ratio.value, "x raw", "lower", None, None, None, _why(how, ratio)))
            for way, verb in (("save", "saving"), ("restore", "restoring")):
                added = self._median(COMPRESSION, _of(f"{state}_{way}_cpu"))
                raw = self._median(COMPRESSION, _of(f"{state}_raw_{way}_cpu"))
                how = f"what compression adds to {verb} it, all threads; beside it {verb} it raw"
                name = f"zstd_{way}_cpu_{state}"
                rows.append(Row(name, added.value, "CPU-s/GB", "lower", "raw", raw.value, None, _why(how, added)))
        rate = self._median(TRAINING_COMPRESSED, _of("rate"))
        how = _why("as train_rate_during_save, on posix, while the save in flight is compressed", rate)
        unit, peer = "x without a save", "no save in flight"
        rows.append(Row("zstd_train_rate_during_save", rate.value, unit, "higher", peer, 1.0, rate.value, how))
        return rows

    def _details(self) -> list[Row]:
        rows = []
        for label in self._measures:
            if label.startswith((TRAINING, TRAINING_WITH_AGENT)) or label in {COMPRESSION, TRAINING_COMPRESSED}:
                continue
            for name, unit, better, figure in _DETAILS:
                found = self._median(label, figure)
                if found.value is not None:
                    taken = sum(isinstance(one, dict) for one in self._measures[label])
                    how = _why(f"median of {taken}{self._servers(label)}", found)
                    rows.append(Row(f"{label}: {name}", found.value, unit, better, None, None, None, how))
            if not any(isinstance(one, dict) for one in self._measures[label]):
                why = self._median(label, _of("seconds")).why
                rows.append(Row(label, None, "", "higher", None, None, None, f"could not run: {why}"))
        return rows

    def _servers(self, label: str) -> str:
        """What the servers had to compute meanwhile: on the same machine, it is time that the client lacks."""
        taken = [one for one in self._measures[label] if isinstance(one, dict)]
        parts = []
        for key in ("server_cpu_seconds", "put_server_cpu_seconds", "get_server_cpu_seconds"):
            for server in taken[0].get(key, {}):
                cpu = median(one[key][server] / (one["bytes"] / _GB) for one in taken)
                which = key.removesuffix("server_cpu_seconds").rstrip("_")
                parts.append(f"{server} {cpu:.2f}{f' ({which})' if which else ''}")
        return f"; the servers' CPU-s/GB: {', '.join(parts)}" if parts else ""

    def _median(self, label: str, figure: Callable[[Figures], float]) -> _Found:
        taken = self._measures.get(label, [])
        values = []
        for one in taken:
            if isinstance(one, dict):
                try:
                    values.append(figure(one))
                except KeyError:
                    return _Found(None, label, "it has no such figure")
        failed = [one.why for one in taken if isinstance(one, Failed)]
        if values:
            why = f"{len(failed)} of {len(taken)} repeats failed: {failed[0]}" if failed else ""
            return _Found(median(values), label, why)
        return _Found(None, label, failed[0] if failed else "it was left out")

    def _best(
        self, subject: str, figure: Callable[[Figures], float], choose: Callable[..., _Found], suffix: str = ""
    ) -> _Found:
        """Over a peer's thread counts."""
        ways = [label for label in self._measures if label.startswith(f"{subject} x") and label.endswith(suffix)]
        found = [self._median(label, figure) for label in ways if suffix or ", " not in label]
        measured = [one for one in found if one.value is not None]
        if measured:
            return choose(measured, key=lambda one: one.value)
        return found[0] if found else _Found(None, subject, "it was left out")


def _of(name: str) -> Callable[[Figures], float]:
    return lambda figures: float(figures[name])


def _rate(figures: Figures) -> float:
    return float(figures["bytes"] / figures["seconds"] / _GB)


def _rate_of(seconds: str) -> Callable[[Figures], float]:
    return lambda figures: float(figures["bytes"] / figures[seconds] / _GB)


def _put_rate(figures: Figures) -> float:
    return float(figures["bytes"] / figures["put_seconds"] / _GB)


def _cpu(figures: Figures) -> float:
    return float(figures["cpu_seconds"] / (figures["bytes"] / _GB))


def _cpu_of(part: str) -> Callable[[Figures], float]:
    return lambda figures: float(figures[f"{part}cpu_seconds"] / (figures["bytes"] / _GB))


def _sent_vs_changed(figures: Figures) -> float:
    return float(figures["sent_bytes"] / figures["changed_bytes"])


_DETAILS: tuple[tuple[str, str, Literal["lower", "higher"], Callable[[Figures], float]], ...] = (
    ("rate", "GB/s", "higher", _rate),
    ("PUT rate", "GB/s", "higher", _put_rate),
    ("GET rate", "GB/s", "higher", lambda figures: figures["bytes"] / figures["get_seconds"] / _GB),
    ("CPU", "CPU-s/GB", "lower", _cpu),
    ("CPU of PUTs", "CPU-s/GB", "lower", lambda figures: figures["put_cpu_seconds"] / (figures["bytes"] / _GB)),
    ("CPU of GETs", "CPU-s/GB", "lower", lambda figures: figures["get_cpu_seconds"] / (figures["bytes"] / _GB)),
    ("stall", "s", "lower", _of("stall_seconds")),
    ("state dict", "s", "lower", _of("state_dict_seconds")),
    ("peak extra memory", "MiB", "lower", lambda figures: figures["peak_extra_bytes"] / _MIB),
)


def _ratio(name: str, ours: _Found, peer: _Found, better: Literal["lower", "higher"], unit: str, how: str) -> Row:
    """The figure is the ratio itself."""
    ratio = _quotient(ours, peer)
    if ours.value is not None:
        how = f"{how}: {ours.value:.3f} {unit}"
    return Row(name, ratio, f"x the peer's {unit}", better, peer.label, peer.value, ratio, _why(how, ours, peer))


def _beside(name: str, ours: _Found, peer: _Found, better: Literal["lower", "higher"], unit: str, how: str) -> Row:
    """The figure stands for itself, and the peer's beside it."""
    return Row(name, ours.value, unit, better, peer.label, peer.value, _quotient(ours, peer), _why(how, ours, peer))


def _quotient(ours: _Found, peer: _Found) -> float | None:
    return ours.value / peer.value if ours.value is not None and peer.value else None


def _why(how: str, *found: _Found) -> str:
    lacks = [f"{'no figure of ' if one.value is None else ''}{one.label}: {one.why}" for one in found if one.why]
    return "; ".join([how, *lacks])
