"""How long jobs on 1 to 8 hosts restore the same state from one store, with the swarm and without it, and how many
bytes leave the store. Writes benchmarks/results/swarm.json.

All hosts are loopback addresses of this machine, with two ranks each. What is scarce here is the store: all that it
sends passes a relay that lets a bounded number of bytes through in a second. The hosts' processors are this machine's,
so the rate must be low enough for the store to be what they wait for.

python -m benchmarks.swarm [--size 32MiB] [--rate-mb 8] [--hosts 1 2 4 8] [--repeats 3] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from tests.support.tcp_relay import TcpRelay, tcp_relay

from benchmarks.processes import Failed, Figures, measured
from benchmarks.report import write_json
from benchmarks.rows import Row
from benchmarks.run import RESULTS, machine, size_bytes
from benchmarks.servers import servers
from benchmarks.spec import Spec
from holdfast_client.chunks.connections import RateLimit

RANKS_OF_A_HOST = 2
CHUNKS = 64
"""About so many, as a large state has: in chunks of the usual size a small one is a single chunk, and has one owner."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=size_bytes, default=size_bytes("32MiB"), help="bytes of state")
    parser.add_argument("--rate-mb", type=float, default=8, help="what the store sends, in MB/s")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8], help="the ratios are to the first")
    parser.add_argument("--repeats", type=int, default=3, help="the figures are the medians of so many")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for what is written")
    arguments = parser.parse_args()
    rows = [*swarm_rows(arguments.size, arguments.rate_mb * 1e6, arguments.hosts, arguments.repeats)]
    write_json([*rows, machine(arguments.size, arguments.repeats)], arguments.results / "swarm.json")
    for row in rows:
        ratio = "" if row.ratio is None else f", {row.ratio:.2f} x the first"
        print(f"{row.name}: {row.value:.3g} {row.unit}{ratio}; {row.how}")


def swarm_rows(state_bytes: int, bytes_per_second: float, hosts: Sequence[int], repeats: int) -> list[Row]:
    """Raises RuntimeError if a case fails."""
    with servers("holdfast-posix") as started:
        chunked = {"chunk_bytes": max(1, state_bytes // CHUNKS // 4096) * 4096}
        spec = Spec("holdfast_save", state_bytes, folder=str(started.folder), server_pids=started.pids, options=chunked)
        saved = _figures(spec, started.environment)
        options = {"fingerprint": saved["fingerprint"], "number": saved["number"], "ranks_of_a_host": RANKS_OF_A_HOST}
        restore = replace(spec, case="on_host", options=options | {"case": "holdfast_restore"})
        address, _, port = started.environment["HOLDFAST_URL"].removeprefix("http://").rpartition(":")
        with tcp_relay(address, int(port)) as relay:
            relay.answers = RateLimit(int(bytes_per_second))
            through = {"HOLDFAST_URL": f"http://127.0.0.1:{relay.port}", "HOLDFAST_DIRECT_FILES": "false"}
            return [
                row
                for swarm in ("true", "false")
                for row in _rows(
                    restore, started.environment | through | {"HOLDFAST_SWARM": swarm}, relay, hosts, repeats
                )
            ]


def _rows(restore: Spec, environment: dict[str, str], relay: TcpRelay, hosts: Sequence[int], repeats: int) -> list[Row]:
    rows: list[Row] = []
    way = "passing chunks on" if environment["HOLDFAST_SWARM"] == "true" else "each for itself"
    for count in hosts:
        seconds, sent = [], []
        for _ in range(repeats):
            before = relay.answered_bytes
            figures = _figures(restore, environment, ranks=count * RANKS_OF_A_HOST)
            seconds.append(figures["seconds"])
            sent.append((relay.answered_bytes - before) / figures["bytes"])
        value, alone = median(seconds), rows[0].value if rows else median(seconds)
        ratio = None if alone is None else value / alone
        how = f"the store sent {median(sent):.2f} x the state"
        rows.append(Row(f"restore on {count} hosts, {way}", value, "s", "lower", f"on {hosts[0]}", alone, ratio, how))
    return rows


def _figures(spec: Spec, environment: dict[str, str], ranks: int = 1) -> Figures:
    figures = measured(Path(sys.executable), spec, environment, ranks=ranks)
    if not isinstance(figures, Failed):
        return figures
    raise RuntimeError(f"{spec.case} of {ranks} ranks: {figures.why}")


if __name__ == "__main__":
    main()
