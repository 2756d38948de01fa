"""A training loop that tells each step as it goes: python -m tests.chaos.network_job RUN

It saves step 0 and waits for the commit, then for a line on stdin. Step 1 is saved in the background, and every
hundredth step after it is due; the loop ends when one of those is committed as well.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import holdfast
from tests.chaos.network import SMALL_CHUNKS, big_tensor


def state_at(step: int) -> dict[str, Any]:
    return {"big": {"t": big_tensor(step)}, "notes": {"step": step}}


def main(run: str) -> None:
    with holdfast.Checkpointer(run, create=True, save=holdfast.Every(steps=100), chunk_sizes=SMALL_CHUNKS) as ckpt:
        assert ckpt.restore(state_at(0)) == 0
        ckpt.save(0, state_at(0)).committed.result(timeout=60)
        say("committed 0")
        sys.stdin.readline()
        step, handles = 1, [ckpt.save(1, state_at(1))]
        say("staged 1")
        while ckpt.stats.last_committed_step in (0, 1):
            step += 1
            time.sleep(0.05)
            if (handle := ckpt.step(step, state_at(step))) is not None:
                handles.append(handle)
            say(f"step {step}")
            while handles and handles[0].committed.done():
                tell(handles.pop(0))
    for handle in handles:
        tell(handle)
    say("closed")


def tell(ended: holdfast.SaveHandle) -> None:
    error = ended.committed.exception(timeout=0)
    say(f"{type(error).__name__ if error else 'committed'} {ended.step}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
