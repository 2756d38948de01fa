"""One rank of a job that a test kills: python -m tests.chaos.trainer RUN HOLD_RANK HOLD_STEP

Saves every step. HOLD_RANK never finishes the upload of HOLD_STEP: it says so and sleeps, to be killed in the middle.
"""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

import holdfast
from tests.support.training import Job


def main(run: str, hold_rank: int, hold_step: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=1), create=True) as ckpt:
        start = ckpt.restore(job.state)
        print(f"start {start}", flush=True)
        upload = ckpt.parts.pipeline._chunks

        def held(saving, staged):
            chunks = upload(saving, staged)
            yield next(chunks)
            if rank == hold_rank and saving.step == hold_step:
                ckpt.parts.pipeline._writer.begin()
                print("holding", flush=True)
                time.sleep(3600)
            yield from chunks

        ckpt.parts.pipeline._chunks = held
        for step in range(start, 1000):
            job.step(step)
            ckpt.step(step, job.state)
            ckpt.wait()
            print(f"saved {step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
