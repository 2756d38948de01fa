"""A job that measures each step, to be killed: python -m tests.chaos.measuring_trainer RUN"""

from __future__ import annotations

import sys
import time

import holdfast
from tests.support.training import Job


def main(run: str) -> None:
    job = Job(0)
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=5), create=True) as ckpt:
        start = ckpt.restore(job.state)
        attempt = ckpt.parts.session.opened.attempt
        print(f"start {start}", flush=True)
        for step in range(start, 100_000):
            time.sleep(0.02)
            handle = ckpt.step(step, job.state, metrics={"loss": float(1000 * attempt + step)})
            if handle is not None:
                handle.committed.result(60)
                print(f"saved {step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
