"""A restore of one rank of a job on several hosts, which are loopback addresses of this machine."""

from __future__ import annotations

import os
import socket
from typing import Any

from benchmarks.cases import holdfast_restore
from benchmarks.spec import Spec


def run(spec: Spec) -> dict[str, Any]:
    host = int(os.environ["RANK"]) // spec.options["ranks_of_a_host"]
    socket.gethostname = lambda: f"host{host}"
    os.environ["HOLDFAST_SWARM_ADDRESS"] = f"127.0.0.{host + 2}"
    return holdfast_restore.run(spec)
