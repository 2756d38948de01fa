"""Data loaders that resume in the middle of an epoch, with exactly the next sample: a plain DataLoader, resumable.

    sampler = holdfast.data.ResumableSampler(dataset, shuffle=True, seed=0)
    loader = holdfast.data.ResumableLoader(DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=4))
    state = {"model": model, "optimizer": optimizer, "dataloader": loader}

`SeededDataset(dataset)` makes augmentation repeatable as well. torchdata's StatefulDataLoader needs none of this: it
goes into the state as it is. With a StatefulDistributedSampler it goes on with another number of ranks.
"""

from holdfast.data.loader import ResumableLoader
from holdfast.data.sampler import ResumableSampler
from holdfast.data.seeded import SeededDataset

__all__ = ["ResumableLoader", "ResumableSampler", "SeededDataset"]
