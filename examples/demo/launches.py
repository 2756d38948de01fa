"""One launch of the training job: torchrun and its workers, started, watched, and killed without warning."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

_TRAIN = Path(__file__).with_name("train.py")


class Launch:
    """Use it as a context manager: whatever happens, no process of the launch outlives the block."""

    def __init__(self, command: Sequence[str], *, environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a Ctrl-C at the terminal is for the demo, which then ends its launches
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def last_words(self) -> list[str]:
        """The last lines of the workers; torchrun's own summary, which follows them, tells less."""
        text = self._log.read_text(errors="replace")
        before_summary, _, _ = text.rpartition("torch/distributed/elastic")
        of_workers = [line for line in before_summary.splitlines() if line.startswith("[rank")]
        return (of_workers or text.splitlines())[-15:] or ["it said nothing"]

    def kill(self) -> None:
        """SIGKILL to torchrun and to every worker: no process gets a chance to finish anything."""
        root = psutil.Process(self._process.pid) if self._process.poll() is None else None
        if root is None:
            return
        root.suspend()  # so that it cannot start a worker between the look and the kill
        # torchrun gives each worker a session of its own: the group of torchrun alone would leave them running.
        family = [root, *root.children(recursive=True)]
        for process in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._process.wait()
        while any(_is_alive(process) for process in family):
            time.sleep(0.01)

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def torchrun(ranks: int, *arguments: str) -> list[str]:
    """The command of a launch. The same one starts a run and resumes it."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
        *(str(_TRAIN), *arguments),
    ]


def launch_environment(base: dict[str, str], service: dict[str, str], *, temporary: Path) -> dict[str, str]:
    """`temporary`: where a killed torchrun may leave its own temporary folders."""
    return {
        **base,
        **service,
        "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1",
        # Workers that reuse torchrun's own store hang or fail now and then when gloo starts again.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _is_alive(process: psutil.Process) -> bool:
    # An orphan whose new parent does not reap it stays a zombie; it does nothing any more.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
