"""Train a small GPT on the standard library's source; kill it whenever you like; launch the same command again.

    holdfast serve &
    torchrun --nproc-per-node=2 examples/demo/train.py demo/gpt --steps 100 --journal /tmp/journal

This is the part to copy. Four things make a resumed run equal to one that never stopped, bit for bit: everything
that changes is in `state`, the random number generators are seeded before `restore`, nothing draws from the global
generator behind the loop's back, and DDP adds gradients in an order that a restart does not change.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from fingerprint import fingerprint
from gpt import GPT
from journal import Journal
from text import TextLoader, standard_library_text
from torch.nn.parallel import DistributedDataParallel

import holdfast

SEED = 20_240


def main() -> None:
    options = _parse()
    # More threads, or another algorithm after a restart, would add floating-point numbers in another order.
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(SEED)  # the same first weights on every rank
    model = GPT(width=options.width, layers=options.layers, heads=options.width // 64, length=options.length)
    # After its first backward DDP sorts its buckets anew, and a sum over three ranks or more depends on the buckets.
    # With this flag it keeps the first ones, so a resumed run adds as the uninterrupted one does.
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    torch.manual_seed(SEED + 1 + rank)  # but another dropout on each
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=24, eta_min=1e-4)
    text = standard_library_text()
    loader = TextLoader(text, batch=options.batch, length=options.length, rank=rank, world_size=world_size, seed=SEED)

    state = {"model": parallel, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": loader}
    # A data loader's state is each rank's own unless it is declared to be the same on all; only then can a run go on
    # with another number of ranks.
    every = holdfast.Every(steps=options.save_every)
    with holdfast.Checkpointer(options.run, save=every, replicated=["dataloader"]) as checkpointer:
        start = checkpointer.restore(state)
        journal = Journal(options.journal, rank)
        journal.started(start, world_size, fingerprint(parallel, optimizer))
        for step in range(start, options.steps):
            tokens, targets = loader.next_batch()
            loss = parallel(tokens, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            journal.stepped(step, loss.item(), fingerprint(parallel, optimizer) if rank == 0 else None)
            if step < options.steps - 1:
                checkpointer.step(step, state, metrics={"loss": loss})
            else:
                checkpointer.save(step, state, metrics={"loss": loss})

    dist.barrier()  # gloo aborts now and then when one rank leaves while another still talks to it
    dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="project/run")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--save-every", type=int, default=8, help="steps between two saves")
    parser.add_argument("--journal", required=True, help="folder for one JSON-lines file per rank")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=64, help="bytes of text in one sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
