"""Run a function on N real processes joined by gloo, and get their results: `run_ranks(function, world_size, …)`.

The function must be importable by name; it is called as function(rank, *args). The processes are forked from one that
has imported torch and Holdfast and has done nothing else: to import them takes longer than most of what is tested here.
"""

import math
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from tests.support.forked import fork_server, own_random_numbers
from tests.support.ports import free_ports
from tests.support.ranks import rank_environment


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 120.0,
    peers_seconds: float = 3.0,
    backend: str = "gloo",
) -> list[Any]:
    """Results in rank order. `peers_seconds`: how long a failed rank's peers have to end by themselves. `backend`: of
    torch.distributed, for ranks on GPUs.

    Raises AssertionError with every failed rank's traceback; no process outlives the call."""
    server = fork_server()
    port = free_ports()
    ranks = []
    for rank in range(world_size):
        ours, theirs = server.Pipe(duplex=False)
        environment = os.environ | rank_environment(rank, world_size, port)
        process = server.Process(
            target=_rank_main, args=(theirs, function, rank, world_size, environment, backend, args), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _collect(ranks, time.monotonic() + timeout_seconds, peers_seconds)
    finally:
        for process, connection in ranks:
            process.kill()
            process.join()
            connection.close()


def _collect(ranks: list[tuple[Any, Connection]], deadline: float, peers_seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_ranks = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    # A failed rank leaves its peers in a collective: give them a moment to say so too, and end.
    while open_ranks:
        remaining = min(deadline - time.monotonic(), peers_seconds if failures else math.inf)
        ready = wait(list(open_ranks), timeout=max(remaining, 0.0))
        if not ready:
            break
        for connection in ready:
            rank = open_ranks.pop(connection)
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                ranks[rank][0].join()
                succeeded, value = False, f"died with exit code {ranks[rank][0].exitcode}"
            (results if succeeded else failures)[rank] = value
    for rank in open_ranks.values():
        failures.setdefault(rank, "gave no result in time")
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
    return [results[rank] for rank in range(len(ranks))]


def _rank_main(
    connection: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    environment: dict[str, str],
    backend: str,
    args: tuple[Any, ...],
) -> None:
    import torch.distributed as dist

    # What a new process would have of its own: the environment of now, and random numbers.
    os.environ.clear()
    os.environ.update(environment)
    own_random_numbers()
    torch.set_num_threads(1)
    try:
        dist.init_process_group(backend, rank=rank, world_size=world_size)
        outcome = (True, function(rank, *args))
        dist.barrier()
    except BaseException:
        outcome = (False, traceback.format_exc())
    # Plain pickle: the pipe's own would hand over tensors as file descriptors of a process that ends before they open.
    connection.send_bytes(pickle.dumps(outcome))
    connection.close()
    # No destroy_process_group: gloo's teardown aborts now and then when a peer is gone first.
    os._exit(0)
