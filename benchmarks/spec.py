"""What one measured process is told, as JSON on its command line. Written by schedule.py, read by case.py."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spec:
    """`case` is a module of benchmarks.cases. Credentials are not in here: they are in the environment."""

    case: str
    size_bytes: int
    rounds: int = 1
    """Measured saves; one that is not measured comes first and warms every buffer."""
    folder: str = ""
    """An empty folder on tmpfs that is this subject's own; a restore gets the one that its save has filled."""
    endpoint: str = ""
    bucket: str = ""
    device: str = "cpu"
    """Where the state is: cpu, or cuda for the first GPU."""
    server_pids: dict[str, int] = field(default_factory=dict)
    """Whose CPU time is the server's, by name."""
    options: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Spec:
        return cls(**json.loads(text))
