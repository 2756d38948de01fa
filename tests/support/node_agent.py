"""`holdfast agent serve` as a process of its own, ready to take saves; and jobs that are told of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast_client.chunks import peer_http
from holdfast_client.cli.main import main
from tests.support.processes import ServerProcess
from tests.support.serve import ENTRY_POINT, HOLDFAST, without_holdfast_settings

PATIENT = f"{__name__}:serve_patiently"


def serve_patiently() -> None:
    peer_http.CONNECT_SECONDS = peer_http.SILENCE_SECONDS = 90.0
    main()


@dataclass
class ServedAgent:
    socket: Path
    process: ServerProcess

    @property
    def log(self) -> str:
        return self.process.log_text


@contextmanager
def agent_serve(
    log: Path,
    *options: str,
    socket: Path | None = None,
    forked: bool = True,
    patient: bool = False,
    address: str = "",
) -> Iterator[ServedAgent]:
    """It knows nothing of the service: each rank tells it. `socket`: in place of one in a folder of its own.
    `forked`: as a ServerProcess's. `patient`: it waits for other agents however late they answer. `address`: of its
    host."""
    # Not below pytest's own folder, whose path may be longer than a socket's can be.
    with tempfile.TemporaryDirectory(prefix="holdfast-agent-") as folder:
        where = socket or Path(folder) / "agent.sock"
        process = ServerProcess(
            [
                (PATIENT if patient else ENTRY_POINT) if forked else HOLDFAST,
                "agent",
                "serve",
                "--socket",
                str(where),
                *options,
            ],
            log=log,
            ready=lambda: "serving at" in log.read_text() if log.exists() else False,
            env=without_holdfast_settings() | ({"HOLDFAST_AGENT_ADDRESS": address} if address else {}),
            forked=forked,
        )
        try:
            yield ServedAgent(where, process)
        finally:
            process.kill9()
