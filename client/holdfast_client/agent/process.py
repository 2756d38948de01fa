"""Where the agent of a node listens, and one that `holdfast launch --agent` has started for its job."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from holdfast_client.agent.channel import connect
from holdfast_client.errors import ConfigurationError
from holdfast_client.settings import ClientSettings

_PROGRAM = "from holdfast_client.cli.main import main; main()"
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.05
_CONNECT_SECONDS = 10.0


def socket_path(named: Path | None = None) -> Path:
    """Else HOLDFAST_AGENT, else one of this user's on the node's own disk: nodes may share the home folder."""
    default = Path(f"/tmp/holdfast-{os.geteuid()}/agent.sock")  # noqa: S108  (its folder must be this user's alone)
    return (named or ClientSettings().agent or default).expanduser().absolute()


def serves_at(path: Path) -> bool:
    """Raises ConfigurationError if other users could put a socket of theirs there."""
    try:
        connect(path, _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


class LaunchedAgent:
    """Ends by `end`, or once this process is gone. The end of this process's group or terminal is not its own."""

    def __init__(self, path: Path, grace_seconds: int) -> None:
        """Returns when an agent serves at `path`, this one or another launch's: then this one stands by until that has
        ended. Raises ConfigurationError if none does."""
        options = ["--socket", str(path), "--grace", str(grace_seconds), "--of-launch"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, "agent", "serve", *options],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509  (this process has no other thread)
        )
        while not serves_at(path):
            if self._process.poll() is not None and not serves_at(path):
                raise ConfigurationError("No agent could be started, as said above. Mend it, or leave --agent out.")
            time.sleep(_LOOK_SECONDS)

    def end(self, wait_seconds: float) -> int | None:
        """Tells it that no rank is left, and returns its exit code; None while it still finishes saves, for at most its
        own grace."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(wait_seconds)
            return 0 if code == -signal.SIGTERM else code  # it was still starting, or standing by
        return None


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
