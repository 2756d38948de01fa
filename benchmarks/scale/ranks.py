"""Some ranks of a storm: python -m benchmarks.scale.ranks. Reads `Orders` from stdin, says READY, waits for a line, and
prints `Told` as its last line."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from pydantic import BaseModel

from benchmarks.measure import take_what_is_left
from holdfast_client import host_calls
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.workers import TransferWorkers, WorkerThreads
from holdfast_client.client import Client
from holdfast_client.host_calls import HostCalls
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.checkpoints import BeginCheckpoint, Component, IndexOrdinals, ShardSummary
from holdfast_protocol.runs import parse_run
from holdfast_protocol.states import CheckpointState

READY = "ready"
_CHUNK_BYTES = 512
_SENDERS = 64
_RETRY_SECONDS = 900.0  # HOLDFAST_SAVE_RETRY_SECONDS, unless it is set


class Orders(BaseModel):
    """Ranks `first` to `last` - 1, on hosts of `ranks_per_host` each. They save what `begin` says, and then, in the
    storm, the step after it. The service is found by the environment."""

    run: str
    begin: BeginCheckpoint
    first: int
    last: int
    ranks_per_host: int
    take_what_is_left: bool = False
    """Of the machine's cores, as ranks that have cores of their own."""


class Told(BaseModel):
    """`seconds`: from the start of the storm until each rank was sealed, by rank."""

    seconds: list[float]
    cpu_seconds: float
    committed: bool
    """One of these ranks' seals has committed the checkpoint."""


class Ranks:
    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._run = parse_run(orders.run)
        count = orders.last - orders.first
        self._clients = [Client() for _ in range(count)]
        # As the trainer does for a save in the background.
        self._savers = [each.with_retry_deadline(_RETRY_SECONDS, threading.Event()) for each in self._clients]
        self._host_calls = [
            calls
            for at in range(0, count, orders.ranks_per_host)
            for calls in _host(self._savers[at : at + orders.ranks_per_host])
        ]
        # The threads of the ranks' own workers would be thousands. Each rank has a call under way, as on its own, and
        # a chunk waits for a sender no longer than on its own.
        self._workers = TransferWorkers(_SENDERS)
        self._workers.calls.end()
        self._workers.calls = WorkerThreads(count, "call")

    def save_once(self) -> None:
        """Without haste, a few hosts at a time. A running job has saved before: it has open connections, has shown that
        it sees the store's folder, and the ranks of a host know each other."""
        with ThreadPoolExecutor(_SENDERS) as pool:
            list(pool.map(lambda at: self._save(at, self._orders.begin), range(len(self._clients))))

    def storm(self) -> Told:
        count = len(self._clients)
        gate = threading.Barrier(count + 1)
        begin = self._orders.begin.model_copy(update={"step": self._orders.begin.step + 1})

        def save(at: int) -> tuple[float, CheckpointState]:
            gate.wait()
            return self._save(at, begin)

        with ThreadPoolExecutor(count) as pool:
            pending = [pool.submit(save, at) for at in range(count)]
            gate.wait()
            began, cpu = time.monotonic(), time.process_time()
            ended = [each.result() for each in pending]
        return Told(
            seconds=[at - began for at, _ in ended],
            cpu_seconds=time.process_time() - cpu,
            committed=any(state is CheckpointState.COMMITTED for _, state in ended),
        )

    def close(self) -> None:
        for calls in self._host_calls:
            if calls is not None:
                calls.close()
        self._workers.close()
        for client in self._clients:
            client.close()

    def _save(self, at: int, begin: BeginCheckpoint) -> tuple[float, CheckpointState]:
        chunks = [OutgoingChunk.of(memoryview(os.urandom(_CHUNK_BYTES))) for _ in range(2)]
        rank = self._orders.first + at
        writer = ShardWriter(
            self._savers[at],
            self._run,
            rank,
            begin,
            workers=self._workers,
            host_calls=self._host_calls[at],
        )
        summary = ShardSummary(components={"model": Component(kind="model", logical_bytes=_CHUNK_BYTES)})
        index = IndexOrdinals(shard=1, layout=0 if rank == 0 else None)
        view = writer.upload_and_seal(chunks, lambda: (summary, index))
        return time.monotonic(), view.state


def _host(savers: list[Client]) -> list[HostCalls | None]:
    """What the ranks of one host have, the leader's first."""
    secret = secrets.token_hex(32)
    return [HostCalls.of(client, secret=secret, count=len(savers), leads=at == 0) for at, client in enumerate(savers)]


def main() -> None:
    # Each thread that waits for the interpreter wakes up so often to ask for it, and there are a thousand: at the
    # default of 5 ms they use the whole machine for that. A rank of a job has a process of its own.
    sys.setswitchinterval(0.2)
    # A host has cores of its own, on which its ranks come within a moment. Here all hosts share these few.
    host_calls.BEGIN_WINDOW_SECONDS = host_calls.SEAL_WINDOW_SECONDS = host_calls.SILENCE_SECONDS = 30.0
    orders = Orders.model_validate_json(sys.stdin.readline())
    if orders.take_what_is_left:
        take_what_is_left()
    ranks = Ranks(orders)
    ranks.save_once()
    print(READY, flush=True)
    sys.stdin.readline()
    print(ranks.storm().model_dump_json(), flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
