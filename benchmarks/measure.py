"""Clocks and meters of a measured process: wall time, CPU of all its threads, the servers' CPU, peak memory.

Linux only: the peak comes from the kernel's high-water mark, which no sampling thread could miss or disturb.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_POPULATE = 23
"""MADV_POPULATE_WRITE; from Linux 5.14 on. An older kernel refuses it, and measures with whatever pages there are."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class Used:
    """What a block has used, in seconds; complete when the block is left."""

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    server_cpu_seconds: dict[str, float] = field(default_factory=dict)


@contextmanager
def used(server_pids: Mapping[str, int]) -> Iterator[Used]:
    result = Used()
    servers = {name: _cpu_seconds(pid) for name, pid in server_pids.items()}
    cpu, wall = time.process_time(), time.perf_counter()
    yield result
    result.wall_seconds = time.perf_counter() - wall
    result.cpu_seconds = time.process_time() - cpu
    result.server_cpu_seconds = {name: _cpu_seconds(pid) - servers[name] for name, pid in server_pids.items()}


def take_what_is_left() -> None:
    """This process gets the cores that nobody else wants: for load that comes from other machines in truth.

    To be nice is not enough: where the kernel shares the cores among sessions first, that counts within one session
    alone. So the process must have been started in a session of its own, and that is made nice too."""
    os.nice(19)
    with contextlib.suppress(OSError):  # a kernel that does not share by sessions
        Path("/proc/self/autogroup").write_text("19")


def _cpu_seconds(pid: int) -> float:
    # The command's name may hold spaces; behind its bracket come the fields from the third on.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def cpu_seconds_of_tree(pid: int) -> float:
    """Of a process, its children and theirs, those that have ended and were waited for among them."""
    children: dict[int, list[int]] = defaultdict(list)
    spent: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        children[int(fields[1])].append(int(folder.name))
        spent[int(folder.name)] = sum(map(int, fields[11:15])) / _TICKS_PER_SECOND
    tree, total = [pid], 0.0
    while tree:
        at = tree.pop()
        total += spent.get(at, 0.0)
        tree.extend(children[at])
    return total


def memory_bytes_of_tree(pid: int) -> int:
    """Of a process, its children and theirs. What several share counts once."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            children[int((folder / "stat").read_text().rpartition(")")[2].split()[1])].append(int(folder.name))
        except OSError:  # it has ended meanwhile
            continue
    tree, total = [pid], 0
    while tree:
        at = tree.pop()
        tree.extend(children[at])
        try:
            lines = Path(f"/proc/{at}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def warm_pages(size_bytes: int) -> None:
    """Lets the kernel's free memory be memory that it holds: in a virtual machine, pages that were idle for seconds are
    the host's again, and the first write to one costs ten times the copy. Whoever came first would pay for it."""
    # In a process of its own, or it would be in this one's high-water mark.
    touch = (
        f"import mmap; mmap.mmap(-1, {size_bytes}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).madvise({_POPULATE})"
    )
    subprocess.run([sys.executable, "-c", touch], check=False)


class PeakMemory:
    """Resident bytes of this process beyond those at construction."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        self._before = _status_bytes("VmRSS")

    def extra_bytes(self) -> int:
        return _status_bytes("VmHWM") - self._before


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")
