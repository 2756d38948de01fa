"""`holdfast agent serve` as a process of its own, ready to take saves; and jobs that are told of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import ServerProcess
from tests.support.serve import ENTRY_POINT, HOLDFAST, without_holdfast_settings


@dataclass
class ServedAgent:
    socket: Path
    process: ServerProcess

    @property
    def log(self) -> str:
        return self.process.log_text


@contextmanager
def agent_serve(
    log: Path, *options: str, socket: Path | None = None, forked: bool = True, address: str = ""
) -> Iterator[ServedAgent]:
    """It knows nothing of the service: each rank tells it. `socket`: in place of one in a folder of its own.
    `forked`: as a ServerProcess's. `address`: of its host."""
    # Not below pytest's own folder, whose path may be longer than a socket's can be.
    with tempfile.TemporaryDirectory(prefix="holdfast-agent-") as folder:
        where = socket or Path(folder) / "agent.sock"
        process = ServerProcess(
            [ENTRY_POINT if forked else HOLDFAST, "agent", "serve", "--socket", str(where), *options],
            log=log,
            ready=lambda: "serving at" in log.read_text() if log.exists() else False,
            env=without_holdfast_settings() | ({"HOLDFAST_AGENT_ADDRESS": address} if address else {}),
            forked=forked,
        )
        try:
            yield ServedAgent(where, process)
        finally:
            process.kill9()
