"""One rank of a job with a local tier: python -m tests.chaos.spooling_trainer RUN FOLDER UNTIL [DIE_AT STEP]

Trains to UNTIL and saves every step, waiting only until each save is on this node's disk. Says `start N`, then `kept N`
for each save, then `state <digest>` and sleeps, to be killed. With `wait` as DIE_AT it says `waiting` before STEP and
goes on when a line comes in; else it dies like by kill -9 at that point of the save of STEP:

    chunk      a chunk is in the folder, the record is not
    record     the record is there, nothing was uploaded
    upload     in the middle of the upload
    commit     committed, the record is still there
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time

import torch.distributed as dist

import holdfast
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.local.chunk_folder import ChunkFolder
from tests.support.training import Job, values


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arrange(ckpt: holdfast.Checkpointer, die_at: str, step: int) -> None:
    """Puts the end of this process at one place of the way of one save."""
    pipeline = ckpt.parts.pipeline
    if die_at == "chunk":
        chunks = pipeline._chunks

        def torn(job, staged):
            yield from chunks(job, staged)
            if job.step == step:
                yield OutgoingChunk(lambda stop: (time.sleep(0.2), die())[1])

        pipeline._chunks = torn
    elif die_at == "record":
        upload = pipeline._commit
        pipeline._commit = lambda job: die() if job.step == step else upload(job)
    elif die_at == "upload":
        write = pipeline._write

        def cut(writer, job):
            if job.step == step:
                read, reads = ChunkFolder.read_into, []

                def counted(folder, *args, **rest):
                    reads.append(1)
                    if len(reads) > 1:
                        die()
                    return read(folder, *args, **rest)

                ChunkFolder.read_into = counted
            return write(writer, job)

        pipeline._write = cut
    elif die_at == "commit":
        forget = pipeline._forget
        pipeline._forget = lambda job: die() if job.step == step else forget(job)


def main(run: str, folder: str, until: int, die_at: str = "", step: int = -1) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    job = Job(rank, "ddp" if dist.is_initialized() else "plain")
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=1), create=True, local=folder) as ckpt:
        start = ckpt.restore(job.state)
        print(f"start {start}", flush=True)
        arrange(ckpt, die_at, step)
        for at in range(start, until):
            if (die_at, step) == ("wait", at):
                print("waiting", flush=True)
                sys.stdin.readline()
            job.step(at)
            handle = ckpt.save(at, job.state)
            assert handle.local.result(timeout=60)
            print(f"kept {at}", flush=True)
        print(f"state {hashlib.sha256(repr(values(job.state)).encode()).hexdigest()}", flush=True)
        time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:5], *map(int, sys.argv[5:6]))
