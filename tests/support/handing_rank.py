"""A rank that hands its saves to the agent of its node, and is killed by itself or by the test at a moment of its
choice: `python -m tests.support.handing_rank RUN SAVES END BYTES`.

END: `killed` right after the last save() has returned, `ended`: as `killed`, and the service was told before the last
save that the job was preempted, `waits` for each commit, `stays` until the test says a line or kills it, `told`: as
`stays`, and each save waits for a line too, or `preempted`: the line makes it tell so and end by kill -9.

HOST_OF_RANK: the name of the host that it takes itself to be on.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.layout.plan import ChunkSizes
from holdfast_client.chunks import peer_http
from holdfast_protocol.states import AttemptOutcome

PARTS = 8
SIZES = ChunkSizes(65536, 262144, 131072)


def state_of(step: int, size_bytes: int) -> dict[str, Any]:
    """The same on every rank: each stores some of the parts."""
    count = size_bytes // PARTS // 4
    parts = {f"p{part}": nn.Parameter(torch.arange(count) * (part + 1.0) + step) for part in range(PARTS)}
    return {"model": nn.ParameterDict(parts)}


def digest_of(state: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(state["model"].state_dict().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    run, saves, end, size = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    if host := os.environ.get("HOST_OF_RANK"):
        socket.gethostname = lambda: host
    torch.set_num_threads(1)
    # A crowded machine answers late, and what an agent does not answer is read from the store.
    peer_http.CONNECT_SECONDS = peer_http.SILENCE_SECONDS = 90.0
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=world_size)
    ckpt = holdfast.Checkpointer(run, create=True, chunk_sizes=SIZES, check_finite=False)
    state = state_of(-1, size)
    start = ckpt.restore(state)
    print(f"restored {start} {digest_of(state)}", flush=True)
    for step in range(start, start + saves):
        if end == "told":
            sys.stdin.readline()
        is_last = step == start + saves - 1
        if end == "ended" and is_last:
            ckpt.parts.session.end(AttemptOutcome.PREEMPTED)
        handle = ckpt.save(step, state_of(step, size))
        if end in ("killed", "ended") and is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"saved {step}", flush=True)
        if end == "waits":
            print(f"committed {handle.committed.result(timeout=120).step}", flush=True)
    if end in ("stays", "told", "preempted"):
        sys.stdin.readline()
    if end == "preempted":
        ckpt.close(AttemptOutcome.PREEMPTED)
        os.kill(os.getpid(), signal.SIGKILL)
    ckpt.close()
    print("closed", flush=True)
    os._exit(0)  # gloo's teardown aborts now and then when a peer is gone first


if __name__ == "__main__":
    main()
