"""One launch of the user's command, from its start to its SIGKILL. Verification -> **launching** -> recorder (there).

The command is launched unchanged, with an interpreter of its own: an inheritance from the launch before (an imported
library, a hash seed) would hide what a real relaunch meets.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.verify.orders import LaunchOrder, Place, places
from holdfast.verify.records import Trail, read_trails
from holdfast_client.errors import HoldfastError

_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 10.0
_LAST_WORDS = 15


class LaunchFailed(HoldfastError):  # noqa: N818 (as the other errors are named)
    """The script did not do what a verification needs; the message has its last lines."""


@dataclass(frozen=True)
class Launched:
    """The result. `parked`: it reached its last boundary on every rank, and was killed there."""

    trails: list[Trail]
    parked: bool
    log: Path


def launch(
    command: Sequence[str],
    order: LaunchOrder,
    folder: Path,
    *,
    environment: Mapping[str, str],
    timeout_seconds: float,
) -> Launched:
    """Returns once every rank waits at its last boundary, or the command has ended by itself. No process outlives the
    call.

    Raises LaunchFailed when it ends with an error, records nothing, or takes longer than `timeout_seconds`.
    """
    folder.mkdir(parents=True)
    order.write(folder)
    log = folder / "output.log"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, "HOLDFAST_VERIFY_DIR": str(folder)},
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchFailed(
                f"{command[0]!r} cannot be started ({error.strerror}). See that it is a command."
            ) from None
    deadline = time.monotonic() + timeout_seconds
    try:
        while not (parked := _all_parked(folder)) and process.poll() is None:
            if time.monotonic() > deadline:
                _ask_to_end(process)
                raise LaunchFailed(
                    f"The script was not at its last step after {timeout_seconds:.0f} s. "
                    f"Give it longer with --timeout, or fewer steps with --steps. It said:\n{_last_words(log)}"
                )
            time.sleep(_LOOK_SECONDS)
    except (KeyboardInterrupt, SystemExit):
        _ask_to_end(process)
        raise
    finally:
        _kill(process, folder)
    trails = read_trails(folder)
    if not parked and process.returncode != 0:
        raise LaunchFailed(f"The script ended with exit code {process.returncode}. It said:\n{_last_words(log)}")
    if not any(trail.boundaries for trail in trails):
        raise LaunchFailed(
            "The script ended, and no Checkpointer of it came to a step. "
            "verify-resume follows ckpt.step(…) and ckpt.save(…): call one of them after each step."
        )
    return Launched(trails, parked, log)


def _all_parked(folder: Path) -> bool:
    waiting = places(folder, "parked")
    return bool(waiting) and len(waiting) == waiting[0].world_size


def _ask_to_end(process: subprocess.Popen[bytes]) -> None:
    """A launcher such as torchrun then ends its workers, including those that have not recorded their place yet."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)


def _kill(process: subprocess.Popen[bytes], folder: Path) -> None:
    """SIGKILL to the launcher and all ranks, so that none can finish anything."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)  # so that it restarts no worker when it sees one die
    ranks = places(folder, "began")
    for place in ranks:
        _kill_rank(place)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(_runs(place.pid) for place in ranks) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def _kill_rank(place: Place) -> None:
    # torchrun gives each worker a session of its own; the group also holds the rank's loader processes. If the group
    # differs, another process has the number by now.
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(place.pid) == place.process_group != os.getpgrp():
            os.killpg(place.process_group, signal.SIGKILL)


def _runs(pid: int) -> bool:
    """A killed orphan may stay a zombie if its parent does not reap it; it does nothing any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        pass
    if Path("/proc/self").exists():
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _last_words(log: Path) -> str:
    """torchrun's own summary, which follows the workers' output, tells less than that."""
    text = log.read_text(errors="replace")
    before, _, _ = text.rpartition("torch/distributed/elastic")
    of_workers = [line for line in before.splitlines() if line.startswith("[rank")]
    return "\n".join(f"    {line}" for line in (of_workers or text.splitlines())[-_LAST_WORDS:]) or "    nothing"
