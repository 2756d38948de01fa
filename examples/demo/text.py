"""The training text (the standard library's own source) and a loader that can be stopped and resumed."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch


def standard_library_text() -> torch.Tensor:
    """Every `*.py` at the top of the standard library, in name order, as one 1-d uint8 tensor: a few megabytes."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)


class TextLoader:
    """Shuffled windows of a text. Each batch is split over the ranks; no window comes twice in one epoch.

    The state is one number, how many windows all the ranks together have had. So it is the same on every rank, and it
    means the same for another number of ranks: this loader can be resharded.
    """

    def __init__(
        self, text: torch.Tensor, *, batch: int, length: int, rank: int = 0, world_size: int = 1, seed: int = 0
    ) -> None:
        self._windows = text[: text.numel() // (length + 1) * (length + 1)].view(-1, length + 1)
        self._batch, self._rank, self._world_size, self._seed = batch, rank, world_size, seed
        self._position = 0
        self._epoch_order: tuple[int, torch.Tensor] | None = None

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of the next global batch: tokens and targets, each (batch, length) of int64."""
        first = self._position + self._rank * self._batch
        rows = torch.stack([self._windows[self._row(at)] for at in range(first, first + self._batch)]).long()
        self._position += self._batch * self._world_size
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position, self._seed = state["position"], state["seed"]
        self._epoch_order = None

    def _row(self, position: int) -> int:
        epoch, at = divmod(position, len(self._windows))
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            # A generator of its own: drawing from torch's global one would change the dropout of a run that resumes.
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._epoch_order = (epoch, torch.randperm(len(self._windows), generator=generator))
        return int(self._epoch_order[1][at])
