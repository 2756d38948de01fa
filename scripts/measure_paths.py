"""How many files of the product one save and one restore cross, the trainer's and the service's together.

    PYTHONPATH=. .venv/bin/python scripts/measure_paths.py [--list]

Traced, not counted by hand: a file counts when a function of it is called between the call of save() and its commit,
or between the call of restore() and its return. Service, store and trainer share this process. Each is done once
before it is traced: what an import or the first connection does is no part of the path.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from pydantic import SecretStr
from tests.support.service import running_service

import holdfast
from holdfast_client.settings import ClientSettings
from holdfast_service.settings import ServiceSettings

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = tuple(str(ROOT / part) + "/" for part in ("client", "service", "trainer_sdk"))


class Crossed:
    """The files of the product whose functions were called while it was on, of any thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.on = False

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(PRODUCT):
            self.files.add(frame.f_code.co_filename)

    @contextmanager
    def traced(self) -> Iterator[None]:
        self.files, self.on = set(), True
        try:
            yield
        finally:
            self.on = False

    def lines(self) -> int:
        return sum(len(Path(each).read_text(encoding="utf-8").splitlines()) for each in self.files)


def main(show: bool) -> None:
    logging.disable()
    crossed = Crossed()
    threading.setprofile(crossed.profile)  # before any thread of the product begins
    sys.setprofile(crossed.profile)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        settings = ServiceSettings(
            database_url=f"sqlite:///{place / 'catalog.db'}",
            store=f"posix://{place / 'store'}",
            data_dir=place / "data",
            port=0,
        )
        with running_service(settings) as service:
            client = ClientSettings(url=service.url, token=SecretStr(service.token()))
            state = {"model": torch.nn.Linear(64, 64)}
            for path in ("save", "first restore", "restore"):
                with holdfast.Checkpointer("paths/run", create=True, client_settings=client) as ckpt:
                    if path == "first restore":
                        ckpt.restore(state)
                        continue
                    if path == "restore":
                        with crossed.traced():
                            ckpt.restore(state)
                    else:
                        ckpt.restore(state)
                        for step in (1, 2):
                            torch.nn.init.normal_(state["model"].weight)  # else there is nothing to send
                            with crossed.traced():
                                ckpt.save(step, state).committed.result(timeout=60)
                sys.stdout.write(f"{path}: {len(crossed.files)} files, {crossed.lines()} lines\n")
                if show:
                    sys.stdout.writelines(f"    {Path(each).relative_to(ROOT)}\n" for each in sorted(crossed.files))


if __name__ == "__main__":
    main("--list" in sys.argv[1:])
