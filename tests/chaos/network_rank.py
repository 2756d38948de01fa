"""One of two ranks that save and restore together while the network of one of them, the victim, fails."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import holdfast
from holdfast import errors
from holdfast.settings import TrainerSettings
from holdfast_client.chunks import uploader
from holdfast_client.settings import ClientSettings
from tests.chaos.network import BOUND_SECONDS, HELD_BYTES, SMALL_CHUNKS, big_tensor
from tests.support.fault_proxy import SLOW_DOWN, CutReply, CutRequest, DropReply, Fault, FaultProxy, Held, fault_proxy

PASSING: tuple[Fault, ...] = (DropReply(), CutRequest(), CutReply(), SLOW_DOWN)
SAVE = ("begin", "negotiate", "put", "finished", "seal")
TOGETHER = ("begin", "seal_together")
RESTORE = ("read_tickets", "get")


def rank_main(rank: int, service_port: int, token: str, run: str) -> list[str]:
    """What this rank has seen, line by line; both must have seen the same."""
    with fault_proxy(service_port) as proxy, patch.object(uploader, "HELD_BYTES", HELD_BYTES):
        client = ClientSettings(url=proxy.url, token=token, direct_files=False, retry_seconds=20.0)
        settings = TrainerSettings(transfers=4, collective_timeout_seconds=60, save_retry_seconds=20.0)
        with checkpointer(run, client, settings) as ckpt:
            ckpt.parts.pipeline.host_calls.close()  # rank 0's network would carry the calls of the victim
            ckpt.restore(state_of(rank, 0))
            seen = faults_that_pass(ckpt, proxy, rank)
        impatient = client.model_copy(update={"retry_seconds": 0.5})
        with checkpointer(run, impatient, settings.model_copy(update={"save_retry_seconds": 0.5})) as ckpt:
            ckpt.parts.pipeline.host_calls.close()
            seen += faults_that_last(ckpt, proxy, rank)
        with checkpointer(run, client, settings) as ckpt:
            seen += faults_of_the_leader(ckpt, proxy, rank)
        return seen


def checkpointer(run: str, client: ClientSettings, settings: TrainerSettings) -> holdfast.Checkpointer:
    return holdfast.Checkpointer(run, create=True, chunk_sizes=SMALL_CHUNKS, settings=settings, client_settings=client)


def faults_that_pass(ckpt: holdfast.Checkpointer, proxy: FaultProxy, rank: int) -> list[str]:
    seen, step = [], 0
    for call in SAVE:
        for fault in PASSING:
            if rank == 1:
                proxy.script(fault, on=call)
            ckpt.save(step, state_of(rank, step)).committed.result(timeout=BOUND_SECONDS)
            assert rank == 0 or proxy.struck(), f"no {call} came by"
            seen.append(f"committed {step}")
            heal(proxy)
            step += 1
    # Rank 0 asks what became of the checkpoint, and until then rank 1 is late.
    for fault in PASSING:
        asked = threading.Event()
        proxy.script(fault if rank == 0 else Held(asked), on="wait" if rank == 0 else "seal")
        handle = ckpt.save(step, state_of(rank, step))
        until_struck(proxy)
        dist.barrier()
        asked.set()
        handle.committed.result(timeout=BOUND_SECONDS)
        seen.append(f"committed {step}")
        heal(proxy)
        step += 1
    for call in RESTORE:
        for fault in PASSING:
            if rank == 1:
                proxy.script(fault, on=call)
            seen.append(f"restored {restored(ckpt, rank, step - 1)}")
            assert rank == 0 or proxy.struck(), f"no {call} came by"
            heal(proxy)
    return seen


def faults_that_last(ckpt: holdfast.Checkpointer, proxy: FaultProxy, rank: int) -> list[str]:
    state = state_of(rank, -1)
    seen = []
    if rank == 1:
        proxy.script(DropReply(), on="get", times=None)
    try:
        ckpt.restore(state)
    except errors.HoldfastError as error:
        seen.append(type(error).__name__)
    assert state["big"]["t"].equal(big_tensor(2 * -1 + rank)), "one rank cannot, so nothing is touched on any"
    heal(proxy)
    step = ckpt.restore(state)
    for call in ("put", "seal"):
        if rank == 1:
            proxy.script(SLOW_DOWN, on=call, times=None)
        failed = ckpt.save(step, state_of(rank, step)).committed.exception(timeout=BOUND_SECONDS)
        seen.append(f"{type(failed).__name__} {step}")
        heal(proxy)
        step += 1
        ckpt.save(step, state_of(rank, step)).committed.result(timeout=BOUND_SECONDS)
        seen.append(f"committed {step}")
        step += 1
    seen.append(f"restored {restored(ckpt, rank, step - 1)}")
    return seen


def faults_of_the_leader(ckpt: holdfast.Checkpointer, proxy: FaultProxy, rank: int) -> list[str]:
    """Rank 0's network fails, which carries the joint calls of both ranks. On a crowded machine they may come too far
    apart for one of them, but not for all."""
    seen, step = [], ckpt.restore(state_of(rank, -1))
    for call in TOGETHER:
        struck = False
        for fault in PASSING:
            if rank == 0:
                proxy.script(fault, on=call)
            ckpt.save(step, state_of(rank, step)).committed.result(timeout=BOUND_SECONDS)
            struck = struck or bool(proxy.struck())
            seen.append(f"committed {step}")
            heal(proxy)
            step += 1
        assert rank == 1 or struck, f"no {call} came by"
    return seen


def until_struck(proxy: FaultProxy) -> None:
    until = time.monotonic() + BOUND_SECONDS
    while not proxy.struck():
        assert time.monotonic() < until, f"nothing was struck: {proxy.seen}"
        time.sleep(0.01)


def restored(ckpt: holdfast.Checkpointer, rank: int, step: int) -> int:
    state = state_of(rank, -1)
    assert ckpt.restore(state) == step + 1
    assert state["big"]["t"].equal(big_tensor(2 * step + rank))
    return step


def state_of(rank: int, step: int) -> dict[str, Any]:
    """Each rank's own, of every step another."""
    return {"big": {"t": big_tensor(2 * step + rank)}}


def heal(proxy: FaultProxy) -> None:
    """When both ranks are through: the faults of one must not meet the other's next round."""
    dist.barrier()
    proxy.heal()
