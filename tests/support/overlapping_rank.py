"""A rank that hands a save to the agent of its node while its copy goes on beside training (`overlap=True`), and is
killed by the test: `python -m tests.support.overlapping_rank RUN STEPPED`.

STEPPED: 1, the next step has come before, and its proof has been sent to the agent; 0, it has not.
"""

from __future__ import annotations

import sys
import time

import torch

import holdfast
from tests.support.training import Job


def main() -> None:
    run, has_stepped = sys.argv[1], sys.argv[2] == "1"
    torch.set_num_threads(1)
    job = Job(optimizer="momentum")
    ckpt = holdfast.Checkpointer(run, create=True, overlap=True)
    ckpt.restore(job.state)
    job.step(0)
    ckpt.save(0, job.state).committed.result(timeout=120)
    job.step(1)  # the trial of save 0 is over
    print("ready", flush=True)
    sys.stdin.readline()
    handle = ckpt.save(1, job.state)
    handle.staged.result(timeout=120)
    [saving] = ckpt.parts.pipeline.in_flight
    if has_stepped:
        job.step(2)
        while saving.handed is None or not saving.handed._is_proven:
            time.sleep(0.01)
            [saving] = ckpt.parts.pipeline.in_flight
    print("saved 1", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
