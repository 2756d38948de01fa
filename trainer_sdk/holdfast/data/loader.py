"""A DataLoader that counts the batches that the training loop got, not those that its workers have prefetched.

The training loop -> **ResumableLoader** -> DataLoader -> ResumableSampler. The Checkpointer asks for its state between
two steps, and the last batch has been trained on by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader

from holdfast.data.sampler import ResumableSampler
from holdfast.data.seeded import SeededDataset, mixed_seed

Batch = TypeVar("Batch")


class ResumableLoader(Generic[Batch]):
    """Iterate it instead of the DataLoader, and put it into the state.

    loader: a DataLoader made with sampler=ResumableSampler(…).

    One pass yields the rest of the epoch; the pass after it is the next epoch. A pass that ended by `break` continues,
    and a pass during which the state is loaded (a rollback) goes on from there. The order depends on the seed alone,
    and making an iterator draws from no global generator: a resumed run has the same dropout as an uninterrupted one.

    Raises TypeError or ValueError for a DataLoader whose batches cannot be counted.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        sampler = loader.sampler
        if loader.batch_size is not None and isinstance(loader.batch_sampler, BatchSampler):
            sampler = loader.batch_sampler.sampler
        if not isinstance(sampler, ResumableSampler):
            raise TypeError(
                "ResumableLoader needs a DataLoader with sampler=holdfast.data.ResumableSampler(dataset), "
                f"and this one has a {type(sampler).__name__}"
            )
        if not getattr(loader, "in_order", True):
            raise ValueError("a DataLoader with in_order=False hands batches out in any order; leave it out")
        if loader.persistent_workers and isinstance(loader.dataset, SeededDataset):
            raise ValueError("workers that persist never hear of the next epoch; leave persistent_workers out")
        # The workers' seeds come from it, or from the global generator if it is missing.
        loader.generator = torch.Generator()
        self._loader = loader
        self._sampler = sampler
        sampler.count_here()

    @property
    def sampler(self) -> ResumableSampler:
        return self._sampler

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of. Train `while loader.epoch < epochs`: after a rollback to an earlier
        epoch a counter of your own is ahead."""
        return self._sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """As ResumableSampler.set_epoch; without it each pass is the next epoch."""
        self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            moves = self._sampler.moves
            yield from self._rest_of_epoch()
            if self._sampler.moves == moves:
                # Only now: between the last step and the end of the pass the script may do its work of once an epoch.
                self._sampler.set_epoch(self._sampler.epoch + 1)
                return

    def _rest_of_epoch(self) -> Iterator[Batch]:
        """Ends early if the place is set meanwhile, as by a rollback: the pass goes on from there."""
        size = self._loader.batch_size or 1
        # For each pass, so that one which begins in the middle of an epoch has the same seed.
        self._loader.generator.manual_seed(mixed_seed(self._sampler.seed, self._sampler.epoch))
        if isinstance(self._loader.dataset, SeededDataset):
            self._loader.dataset.set_epoch(self._sampler.epoch)
        moves, left = self._sampler.moves, self._sampler.left
        for batch in self._loader:
            self._sampler.advance(min(size, left))
            left -= size
            yield batch
            if self._sampler.moves != moves:
                return

    def state_dict(self) -> dict[str, Any]:
        """The batches that were handed out. The same on all ranks while they take the same number of batches."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect with the next batch. Raises ValueError as ResumableSampler.load_state_dict."""
        self._sampler.load_state_dict(state)

    def load_resharded_state_dict(self, states: Sequence[dict[str, Any]], *, rank: int, world_size: int) -> None:
        """For another number of ranks."""
        self._sampler.load_resharded_state_dict(states, rank=rank, world_size=world_size)
