"""What a job's launcher needs to be told, and which signals it can bear. Read from torch 2.13's torchrun.

torchrun's agent dies of SIGUSR1 and SIGUSR2 and leaves its workers behind. A SIGTERM it passes on, waits, kills what is
left, and ends. Its wait is 30 seconds unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise, and a second signal during
that wait breaks it off. Everything else gets its signals as they come.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Mapping, Sequence

from holdfast_client.outcome_notes import LAUNCH, OUTCOME_DIR

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What the SDK takes as a notice. SIGINT is a person's, and no reason to launch again."""

_TORCHRUN = re.compile(r"(^|[\s/])torchrun(\s|$)")
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_HANDLED_BY_TORCHRUN = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"


def is_torchrun(command: Sequence[str]) -> bool:
    """Whether torchrun's agent is in the child: also behind numactl, in a shell's `-c`, or within accelerate."""
    for word, after in itertools.pairwise(command):
        if word == "-m" and after in _TORCHRUN_MODULES:
            return True
        if word.rpartition("/")[2] == "accelerate" and after == "launch":
            return True
    return any(_TORCHRUN.search(word) for word in command)


def environment_of_child(
    environment: Mapping[str, str], launch: str, outcome_dir: str, grace_seconds: int
) -> dict[str, str]:
    """The child's environment; what the user has set stays as it is."""
    defaults = {
        # A restart on gloo that finds the agent's store as it was joins the dead ranks' rendezvous.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace_seconds),
        # A little less: the signal takes a moment to reach the ranks.
        "HOLDFAST_PREEMPTION_GRACE_SECONDS": str(grace_seconds - min(3.0, grace_seconds / 10)),
        # For signals that reach the agent past us: a batch system may send them to each process of a job.
        "PET_SIGNALS_TO_HANDLE": _HANDLED_BY_TORCHRUN,
    }
    return defaults | dict(environment) | {LAUNCH: launch, OUTCOME_DIR: outcome_dir}


def signal_for_child(number: int, *, torchrun: bool, already_asked: bool) -> int | None:
    """What is sent on for a signal that came; None: nothing."""
    if not torchrun or number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        return number
    return None if already_asked else signal.SIGTERM


def is_preemption(number: int, *, torchrun: bool) -> bool:
    return number in PREEMPTION_SIGNALS or (torchrun and number == signal.SIGUSR2)
