"""A job for the tests of `holdfast launch`, under torchrun: it tells where each launch began and its processes.

launched_job.py RUN FOLDER STEPS [CRASH_AT]: rank 1 dies at step CRASH_AT, the first time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def main() -> None:
    run, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    crash_at = int(sys.argv[4]) if len(sys.argv) > 4 else None
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(3, 1)
    state = {"model": model}
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=2), create=True) as checkpointer:
        start = checkpointer.restore(state)
        restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
        (folder / f"began-{restarts}-{rank}").write_text(f"{start} {os.getpid()}")
        for step in range(start, steps):
            if step == crash_at and rank == 1 and restarts == "0":
                os._exit(3)
            with torch.no_grad():
                model.weight.fill_(float(step))
            dist.barrier()
            checkpointer.step(step, state)
            checkpointer.wait()
            if rank == 0:
                (folder / "newest").write_text(str(step))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's teardown aborts now and then when a peer is gone first


if __name__ == "__main__":
    main()
