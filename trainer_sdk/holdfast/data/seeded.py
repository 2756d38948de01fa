"""Augmentation that is repeatable: the random numbers of each sample come from (seed, epoch, index) alone.

DataLoader (or a worker of it) -> **SeededDataset** -> the user's dataset. Without it, a worker's random numbers depend
on how many samples it has made since its start, and a resumed run starts new workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sized
from typing import Generic, Protocol, TypeVar, cast

import numpy as np
import torch

Sample_co = TypeVar("Sample_co", covariant=True)
T = TypeVar("T")


class Indexed(Protocol[Sample_co]):
    """A dataset that gives a sample by its number."""

    def __getitem__(self, index: int, /) -> Sample_co: ...


class SeededDataset(Generic[Sample_co]):
    """`dataset`, with the generators of python, numpy and torch seeded for each sample, and put back afterwards.

    A sample's augmentation differs from epoch to epoch; a ResumableLoader passes the epoch on to it.
    """

    def __init__(self, dataset: Indexed[Sample_co], *, seed: int = 0) -> None:
        self.dataset = dataset
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Call it before the workers of that epoch are started, because each gets a copy of this."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, index: int) -> Sample_co:
        return with_seed((self._seed, self._epoch, int(index)), lambda: self.dataset[index])


def with_seed(numbers: tuple[int, ...], work: Callable[[], T]) -> T:
    """The result of `work`, with every generator of this process seeded by `numbers`. They are put back afterwards, so
    that nothing else depends on how much it drew."""
    mixed = mixed_seed(*numbers)
    torch_generator = torch.default_generator
    before = random.getstate(), np.random.get_state(), torch_generator.get_state()
    try:
        random.seed(mixed)
        np.random.seed(mixed % 2**32)
        torch_generator.manual_seed(mixed)
        return work()
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch_generator.set_state(before[2])


def mixed_seed(*numbers: int) -> int:
    """63 bits of all the numbers together. A sum would make one seed's second epoch another one's first."""
    sequence = np.random.SeedSequence([number % 2**64 for number in numbers])
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)
