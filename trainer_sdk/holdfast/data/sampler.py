"""Which samples of which epoch this rank trains on next, as a position that all ranks share.

ResumableLoader -> **ResumableSampler** (draws, ahead of training) ; ResumableLoader.advance -> the position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from holdfast.data.seeded import mixed_seed, with_seed

_STATE = {"epoch", "position", "seed", "length"}


class ResumableSampler(Sampler[int]):
    """The indices of one rank, from its place in the epoch on. For DataLoader(sampler=…), inside a ResumableLoader.

    source: a dataset with a length, or another sampler whose order must be kept (a WeightedRandomSampler, say): it is
        drawn once an epoch, seeded by (seed, epoch), and distributed over the ranks.
    shuffle: each epoch has another order of the dataset, by (seed, epoch), and the same on all ranks.
    rank, world_size: of torch.distributed if it is initialised, else of a lone process.
    drop_last: if the ranks cannot share the rest evenly, leave it out. Without it some samples come twice
        at the end of the epoch, as in torch's DistributedSampler.

    Every rank takes every world_size-th sample, so the samples that all ranks have trained on are always a prefix of
    the epoch's order. Its length is the position, which means the same on any number of ranks.
    """

    def __init__(
        self,
        source: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if isinstance(source, DistributedSampler | ResumableSampler):
            raise TypeError(
                f"{type(source).__name__} deals out to ranks itself; give its dataset, or the inner sampler"
            )
        if not hasattr(source, "__len__"):
            raise TypeError(f"{type(source).__name__} has no length; use torchdata's StatefulDataLoader for streams")
        together = dist.is_available() and dist.is_initialized()
        self.world_size = world_size if world_size is not None else dist.get_world_size() if together else 1
        self.rank = rank if rank is not None else dist.get_rank() if together else 0
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size}")
        self._source = source
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._epoch = 0
        self._position = 0
        self._drew = False
        self._is_counted = False
        self.moves = 0
        """How often its place was set rather than reached: samples that were drawn before that are not the next
        ones."""

    @property
    def epoch(self) -> int:
        """The epoch that the next sample is of."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many samples of this epoch all the ranks together have trained on."""
        return self._position

    @property
    def seed(self) -> int:
        return self._seed

    def set_epoch(self, epoch: int) -> None:
        """As in DistributedSampler. The current epoch goes on at its place; any other begins at its first sample."""
        if epoch != self._epoch:
            self._move(epoch, 0)

    def __len__(self) -> int:
        """How many samples a whole epoch has for this rank."""
        return self._share(len(self._source))

    @property
    def left(self) -> int:
        """How many samples of this epoch this rank has still to train on."""
        return self._share(len(self._source) - self._position)

    def __iter__(self) -> Iterator[int]:
        """The rest of this epoch. It changes nothing, because samples are drawn ahead of training."""
        order = self._order()
        rest, count = order[self._position :], self.left
        missing = count * self.world_size - len(rest)
        # The epoch's first samples fill up, several times if there are fewer of them than ranks.
        padded = rest + (order * (missing // max(len(order), 1) + 1))[:missing] if missing > 0 else rest
        self._drew = True
        return iter(padded[self.rank : count * self.world_size : self.world_size])

    def advance(self, samples: int) -> None:
        """This rank, and so each other rank, has trained on so many more samples. ResumableLoader calls it."""
        self._is_counted = True
        self._position = min(self._position + samples * self.world_size, len(self._source))

    def count_here(self) -> None:
        """A caller will count with advance(), from the first batch on."""
        self._is_counted = True

    def state_dict(self) -> dict[str, int]:
        """The same on every rank. Raises RuntimeError if samples were drawn, but no advance() counted the trained
        ones."""
        if self._drew and not self._is_counted:
            raise RuntimeError(
                "ResumableSampler does not know what was trained on: a DataLoader draws samples ahead. "
                "Wrap it, ResumableLoader(DataLoader(…)), and put that into the state."
            )
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed, "length": len(self._source)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the number of samples has changed."""
        if set(state) != _STATE:
            raise ValueError(f"this is not the state of a ResumableSampler: it has {sorted(state)}")
        if state["length"] != len(self._source):
            raise ValueError(
                f"the data had {state['length']} samples and has {len(self._source)} now; a position in another order "
                "means nothing. Begin an epoch with set_epoch(), or give the data that it was."
            )
        self._seed = state["seed"]
        self._move(state["epoch"], state["position"])

    def load_resharded_state_dict(self, states: Sequence[dict[str, Any]], *, rank: int, world_size: int) -> None:
        """For another number of ranks. Raises ValueError if the ranks were not at one position."""
        if any(state != states[0] for state in states):
            raise ValueError("the ranks were not at one position of the data; restore on as many ranks as saved it")
        self.load_state_dict(states[0])

    def _move(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self.moves += 1

    def _share(self, samples: int) -> int:
        return samples // self.world_size if self._drop_last else -(-samples // self.world_size)

    def _order(self) -> list[int]:
        if isinstance(self._source, Sampler):
            return _drawn_from(self._source, self._seed, self._epoch)
        if not self._shuffle:
            return list(range(len(self._source)))
        generator = torch.Generator().manual_seed(mixed_seed(self._seed, self._epoch))
        # The generator's device, whatever the script's default device is.
        order = torch.randperm(len(self._source), generator=generator, device="cpu")
        return cast("list[int]", order.tolist())


def _drawn_from(sampler: Sampler[int], seed: int, epoch: int) -> list[int]:
    """A foreign sampler's order for one epoch, whichever generator it draws from. All generators stay unchanged."""
    own = getattr(sampler, "generator", None)
    before = own.get_state() if own is not None else None
    try:
        if own is not None:
            own.manual_seed(mixed_seed(seed, epoch))
        return with_seed((seed, epoch), lambda: list(sampler))
    finally:
        if own is not None:
            own.set_state(before)
