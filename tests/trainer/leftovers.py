"""A training job that looks at what it has left behind: python -m tests.trainer.leftovers RUN WAY…

Prints a line of JSON for each way to end. A process of its own, so that nothing but Holdfast and torch is in it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from tests.support.fault_proxy import Answer, BlackHole, FaultProxy, fault_proxy

import holdfast
from holdfast.errors import SaveFailed
from holdfast.settings import TrainerSettings
from holdfast_client.settings import ClientSettings

STATE_BYTES = 100_000_000
_TENSORS = 10


@dataclass
class Inventory:
    threads: list[str]
    files: list[str]
    temporary: list[str]
    resident_bytes: int

    @classmethod
    def now(cls) -> Inventory:
        """Files are what /proc shows of them, without what differs from one socket to the next."""
        settle_memory()
        files = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return cls(
            sorted(thread.name for thread in threading.enumerate()),
            sorted(re.sub(r"\[\d+\]", "", os.readlink(file)) for file in files if file.is_symlink()),
            sorted(os.listdir(tempfile.gettempdir())),
            resident_bytes(),
        )

    def beyond(self, before: Inventory) -> dict[str, list[str]]:
        """What is there now and was not before."""
        return {
            name: sorted((Counter(getattr(self, name)) - Counter(getattr(before, name))).elements())
            for name in ("threads", "files", "temporary")
        }


def settle_memory() -> None:
    """What nobody holds any more goes back, out of malloc's arenas too."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def new_state() -> dict[str, dict[str, torch.Tensor]]:
    elements = STATE_BYTES // _TENSORS // 4
    return {"big": {f"t{number}": torch.rand(elements) for number in range(_TENSORS)}}


def checkpointer(run: str, url: str | None = None, **settings: float) -> holdfast.Checkpointer:
    """Everything goes over HTTP, so that there are connections to leave behind."""
    client = {"url": url, "timeout_seconds": 2.0} if url else {}
    return holdfast.Checkpointer(
        run,
        create=True,
        save=holdfast.Every(steps=1),
        settings=TrainerSettings(**settings),
        client_settings=ClientSettings(direct_files=False, **client),
    )


def ten_saves_and_a_restore(run: str) -> list[int]:
    """The resident bytes after each save."""
    state, resident = new_state(), []
    with checkpointer(run) as ckpt:
        ckpt.restore(state)
        for step in range(10):
            for tensor in state["big"].values():
                tensor += 1
            ckpt.save(step, state).committed.result(timeout=120)
            settle_memory()
            resident.append(resident_bytes())
        assert ckpt.restore(state) == 10
    return resident


def exception_in_the_block(run: str) -> None:
    try:
        with checkpointer(run) as ckpt:
            ckpt.restore({})
            ckpt.save(0, new_state())
            raise ZeroDivisionError
    except ZeroDivisionError:
        return


def failed_save(run: str) -> None:
    with through_a_proxy() as proxy:
        proxy.script(Answer(400), on="put", times=None)
        with checkpointer(run, proxy.url) as ckpt:
            ckpt.restore({})
            assert isinstance(ckpt.save(0, new_state()).committed.exception(timeout=120), SaveFailed)


def save_that_cannot_finish(run: str, call: str) -> None:
    with through_a_proxy() as proxy:
        proxy.script(BlackHole(), on=call, times=None)
        with checkpointer(run, proxy.url, drain_seconds=1.0) as ckpt:
            ckpt.restore({})
            handle = ckpt.save(0, new_state())
        assert isinstance(handle.committed.exception(timeout=0), SaveFailed)


def through_a_proxy() -> FaultProxy:
    port = urlsplit(ClientSettings().url).port
    assert port is not None
    return fault_proxy(port)


WAYS: dict[str, Callable[[str], list[int] | None]] = {
    "ten saves": ten_saves_and_a_restore,
    "exception": exception_in_the_block,
    "failed": failed_save,
    **{
        f"stuck at {call}": partial(save_that_cannot_finish, call=call)
        for call in ("begin", "negotiate", "put", "seal")
    },
}


def report(way: str, run: str) -> dict[str, Any]:
    before = Inventory.now()
    resident = WAYS[way](run)
    after = Inventory.now()
    kept_bytes = after.resident_bytes - before.resident_bytes
    return {"left": after.beyond(before), "kept_bytes": kept_bytes, "resident": resident}


def main(run: str, *ways: str) -> None:
    # What is imported and made at the first use stays for the life of the process.
    exception_in_the_block(f"{run}-first")
    for number, way in enumerate(ways):
        print(json.dumps(report(way, f"{run}-{number}")), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
