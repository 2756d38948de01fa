"""What torchrun starts: python -m torch.distributed.run … tests/chaos_run/trainer.py RUN JOURNAL LAUNCH

Trains until the file `until` beside the journal names a last step, and journals every step. With `--undisturbed STEPS`
it trains so many steps with no checkpoints at all: what every other run is compared with.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.layout.plan import ChunkSizes
from tests.chaos_run.clock import follow_clock
from tests.chaos_run.journal import Journal

SAVE_EVERY = 15
STEP_SECONDS = 0.1
UNTIL = "until"
_WIDTH, _BATCH = 160, 8
_COLLECTIVE_SECONDS = 180
# About 16 chunks per save, so that faults meet a save in its middle.
_CHUNKS = ChunkSizes(own_chunk_bytes=32 * 1024, cut_bytes=64 * 1024, pack_bytes=64 * 1024)


def node_name(rank: int) -> str:
    return f"node{rank}"


def socket_on(sockets: Path, rank: int) -> Path:
    """Where the agent of this rank's node listens. The replacement's has the same path, as on real nodes."""
    return sockets / node_name(rank) / "agent.sock"


class Batches:
    """A data loader whose only state is how many batches the job has had."""

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self._seed, self._rank, self._world_size, self._position = seed, rank, world_size, 0

    def next_batch(self) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(self._seed + 7919 * (self._position * self._world_size + self._rank))
        self._position += 1
        return torch.randn(_BATCH, _WIDTH, generator=numbers)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position, self._seed = state["position"], state["seed"]


class Training:
    """The same state whatever the number of ranks; on the same number every step has the same bits, resumed or not."""

    def __init__(self, seed: int) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        layers = (nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(_WIDTH, _WIDTH), nn.GELU())
        plain = nn.Sequential(*layers, nn.Linear(_WIDTH, _WIDTH))
        # As the demo explains: the buckets stay as they are, so a resumed run adds as the undisturbed one does.
        self.model = DistributedDataParallel(plain, find_unused_parameters=True) if dist.is_initialized() else plain
        torch.manual_seed(seed + 1 + rank)  # but another dropout on each
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, T_0=50)
        self.loader = Batches(seed, rank, dist.get_world_size() if dist.is_initialized() else 1)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
            "dataloader": self.loader,
        }

    def step(self) -> torch.Tensor:
        batch = self.loader.next_batch()
        loss = (self.model(batch) - batch.roll(1, dims=1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss

    def digest(self) -> str:
        """SHA-256 of every parameter, every slot of the optimizer, the scheduler and the loader."""
        digest = hashlib.sha256()
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            digest.update(parameter.detach().numpy().data)
            for name, value in sorted(self.optimizer.state[parameter].items()):
                digest.update(name.encode() + torch.as_tensor(value).numpy().tobytes())
        rest = (self.scheduler.state_dict(), self.loader.state_dict(), [g["lr"] for g in self.optimizer.param_groups])
        digest.update(repr(rest).encode())
        return digest.hexdigest()


def train(options: argparse.Namespace, journal: Journal) -> None:
    training = Training(options.seed)
    world_size = dist.get_world_size()
    if options.undisturbed is not None:
        for step in range(options.undisturbed):
            training.step()
            journal.write("step", step=step, state=training.digest())
        return
    every = holdfast.Every(steps=SAVE_EVERY)
    tier, agent = _on_its_node(options, dist.get_rank())
    with holdfast.Checkpointer(
        options.run, save=every, replicated=["dataloader"], local=tier, agent=agent, chunk_sizes=_CHUNKS
    ) as ckpt:
        reads = _noted_reads(ckpt.parts.restorer)
        start = ckpt.restore(training.state)
        journal.write(
            "begun",
            pid=os.getpid(),
            attempt=ckpt.parts.session.opened.attempt,
            world_size=world_size,
            start=start,
            state=training.digest(),
            read=reads[-1] if reads else {},
        )
        step = start
        while not _is_over(options.journal, step):
            loss = training.step()
            journal.write("step", step=step, state=training.digest())
            try:
                # As in the demo: the last step is saved whether it is due or not.
                save = ckpt.save if _is_over(options.journal, step + 1) else ckpt.step
                handle = save(step, training.state, metrics={"loss": loss})
            except holdfast.Preempted as leaving:
                journal.write("preempted", saved=leaving.saved_step)
                raise
            if handle is not None:
                _journal_outcome(journal, handle)
            time.sleep(STEP_SECONDS)
            step += 1


def _on_its_node(options: argparse.Namespace, rank: int) -> tuple[Path | None, Path | None]:
    """Folder of the local tier, and socket of the agent. With agents each rank takes itself to be on a node of its
    own."""
    if options.agents is None:
        return options.tier, None
    socket.gethostname = lambda: node_name(rank)
    return options.tier and options.tier / node_name(rank), socket_on(options.agents, rank)


def _noted_reads(restorer: Any) -> list[dict[str, int]]:
    """What this rank has read from where, of each checkpoint that it tries: the figures of the SDK, which itself tells
    the sum of all ranks."""
    reads: list[dict[str, int]] = []
    read_part = restorer._read

    def noted(*args: Any) -> Any:
        read = read_part(*args)
        elsewhere = {
            "own agent": read.from_memory_bytes,
            "other agents": read.from_agents_bytes,
            "local disk": read.from_host_bytes,
            "other ranks": read.from_peers_bytes,
        }
        reads.append(elsewhere | {"store": read.bytes - sum(elsewhere.values())})
        return read

    restorer._read = noted
    return reads


def _is_over(journal: Path, step: int) -> bool:
    """The last step is named well ahead, so every rank learns of it before it gets there."""
    until = journal / UNTIL
    return until.exists() and step >= int(until.read_text())


def _journal_outcome(journal: Journal, handle: holdfast.SaveHandle) -> None:
    journal.write("saving", step=handle.step)

    def tell(committed: Any) -> None:
        error = committed.exception()
        if error is None:
            journal.write("committed", step=handle.step, checkpoint=committed.result().id)
        else:
            journal.write("failed", step=handle.step, why=f"{type(error).__name__}: {error}")

    handle.committed.add_done_callback(tell)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("journal", type=Path)
    parser.add_argument("launch", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tier", type=Path, help="the folder of a local tier")
    parser.add_argument("--agents", type=Path, help="the folder of the sockets of its nodes' agents")
    parser.add_argument("--undisturbed", type=int)
    options = parser.parse_args()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # what a rank that hangs is doing
    follow_clock()
    dist.init_process_group("gloo", timeout=timedelta(seconds=_COLLECTIVE_SECONDS))
    journal = Journal(options.journal, options.launch, dist.get_rank())
    train(options, journal)
    dist.barrier()  # gloo aborts now and then when one rank leaves while another still talks to it
    dist.destroy_process_group()
    journal.write("ended", how="finished")


if __name__ == "__main__":
    main()
