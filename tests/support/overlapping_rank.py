"""A rank that hands a save to the agent of its node while its copy goes on beside training (`overlap=True`), and is
killed by the test: `python -m tests.support.overlapping_rank RUN STEPPED [FOLDER]`.

STEPPED: 1, the next step has come before, and its proof has been sent to the agent; 0, it has not. FOLDER: of a local
tier, whose disk takes for ever to write the save.
"""

from __future__ import annotations

import sys
import threading
import time

import torch

import holdfast
from holdfast.save import pipeline
from tests.support.training import Job


def main() -> None:
    run, has_stepped = sys.argv[1], sys.argv[2] == "1"
    torch.set_num_threads(1)
    job = Job(optimizer="momentum")
    local = sys.argv[3] if len(sys.argv) > 3 else None
    ckpt = holdfast.Checkpointer(run, create=True, overlap=True, local=local)
    ckpt.restore(job.state)
    job.step(0)
    ckpt.save(0, job.state).committed.result(timeout=120)
    job.step(1)  # the trial of save 0 is over
    pipeline.keep_save = lambda *_, **__: threading.Event().wait()
    print("ready", flush=True)
    sys.stdin.readline()
    handle = ckpt.save(1, job.state)
    handle.staged.result(timeout=120)
    [saving] = ckpt.parts.pipeline.in_flight
    if has_stepped:
        job.step(2)
        while saving.late.on_proven is not None:
            time.sleep(0.01)
    print("saved 1", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
