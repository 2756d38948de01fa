"""A service for one verification: a process of its own, with a catalog and a store in a temporary folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from holdfast_client.errors import HoldfastError

_NEEDED = ("fastapi", "uvicorn", "sqlalchemy", "alembic")
_COMMAND = "from holdfast_client.cli.main import main; main()"
_START_SECONDS = 60.0
_END_SECONDS = 15.0
_LISTENS = re.compile(r"listens on (\S+)")
_PLACE = ("URL", "TOKEN", "DATA_DIR", "LOCAL_DIR", "LOCAL_BYTES", "AGENT", "LAUNCH", "OUTCOME_DIR", "VERIFY_DIR")
"""The settings that name a job's service, its local tier and its launcher."""


def can_serve() -> bool:
    """Whether the service extra is installed."""
    return all(importlib.util.find_spec(module) is not None for module in _NEEDED)


def job_environment(service: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a job that uses another service, and that one's settings."""
    without = {f"HOLDFAST_{name}" for name in _PLACE}
    return {name: value for name, value in os.environ.items() if name not in without} | dict(service)


@contextmanager
def embedded_service(folder: Path) -> Iterator[dict[str, str]]:
    """The settings by which a job finds it. Raises HoldfastError if it does not come up."""
    data, log = folder / "service", folder / "service.log"
    data.mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, "serve", "--port", "0", "--data-dir", str(data)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=own,
            start_new_session=True,
        )
    try:
        yield {"HOLDFAST_URL": _wait_for_url(process, log), "HOLDFAST_DATA_DIR": str(data)}
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := _LISTENS.search(log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.05)
    raise HoldfastError(
        "The service for this verification did not come up. See why with `holdfast serve`; it said: "
        + log.read_text(errors="replace")[-500:]
    )
