"""A plain DataLoader that goes on in the middle of an epoch, and torchdata's StatefulDataLoader: the very same batches
after a resume, whatever the workers have prefetched, on as many ranks as there are."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from roundtrip import load, save
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from holdfast.data import ResumableLoader, ResumableSampler, SeededDataset
from holdfast.errors import StateMismatchError

QUICKSTART = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"


class Augmented:
    """Draws from every generator, as augmentation does."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index, random.random() + float(np.random.rand()) + float(torch.rand(()))


def make(workers: int = 0, *, length: int = 23, batch: int = 4, rank: int = 0, world: int = 1, **options: Any) -> Any:
    dataset = SeededDataset(Augmented(length), seed=3)
    sampler = ResumableSampler(dataset, seed=9, rank=rank, world_size=world, **options)
    return ResumableLoader(DataLoader(dataset, batch_size=batch, sampler=sampler, num_workers=workers))


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def taken(batches: Iterator[Any], count: int) -> list[Any]:
    return [[part.tolist() for part in next(batches)] for _ in range(count)]


def through_holdfast(source: Any, target: Any) -> None:
    """As a checkpoint does it: captured between two steps, and loaded into a new object."""
    load({"dataloader": target}, [save({"dataloader": source})])


@pytest.mark.rule("buffers-from-rank-0")
@pytest.mark.parametrize(("workers", "stop"), [(0, 2), (0, 6), (0, 9), (2, 3)])
def test_a_resumed_loader_gives_the_same_batches_and_draws_no_random_number(workers: int, stop: int) -> None:
    """Six batches an epoch: in the middle of the first, at its end, in the second; and with batches in flight."""
    straight = taken(endless(make()), 14)
    first = make(workers)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    batches = endless(first)
    assert taken(batches, stop) == straight[:stop]
    resumed = make(workers)
    through_holdfast(first, resumed)
    del batches
    assert taken(endless(resumed), 12 - stop) == straight[stop:12]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]
    epochs = [sorted(index for batch in part for index in batch[0]) for part in (straight[:6], straight[6:12])]
    assert epochs == [list(range(23))] * 2, "every sample once an epoch"
    assert straight[:6] != straight[6:12]
    of_sample = dict(zip(straight[0][0], straight[0][1], strict=True))
    again = dict(pair for batch in straight[6:12] for pair in zip(*batch, strict=True))
    assert all(again[index] != value for index, value in of_sample.items()), "another augmentation in each epoch"


def test_what_a_script_does_at_the_end_of_an_epoch_is_done_once_more_exactly_when_it_was_not_saved() -> None:
    def train(loader: Any, notes: list[str], until: int, saved: Any = None) -> None:
        steps = 0
        for epoch in range(loader.epoch, 3):
            loader.set_epoch(epoch)
            for _ in loader:
                notes.append(f"step of {epoch}")
                steps += 1
                if saved is not None and steps == until:
                    through_holdfast(loader, saved)
                    return
            notes.append(f"end of {epoch}")

    straight: list[str] = []
    train(make(), straight, 0)
    assert straight.count("end of 1") == 1
    for until in (5, 6, 7, 12):
        notes: list[str] = []
        resumed = make()
        train(make(), notes, until, resumed)
        train(resumed, notes, 0)
        assert notes == straight, until


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rollback_in_the_middle_of_a_pass_gives_the_same_batches_again(workers: int) -> None:
    straight = taken(endless(make()), 12)
    loader = make(workers)
    batches = endless(loader)
    assert taken(batches, 2) == straight[:2]
    saved = save({"dataloader": loader})
    assert taken(batches, 2) == straight[2:4]
    load({"dataloader": loader}, [saved])
    assert taken(batches, 6) == straight[2:8], "also over the end of the epoch"
    load({"dataloader": loader}, [saved])
    assert taken(batches, 2) == straight[2:4], "back into the epoch before"


def test_the_quickstarts_loop_trains_all_epochs_after_a_rollback_into_the_epoch_before() -> None:
    text = QUICKSTART.read_text(encoding="utf-8")
    [loop] = re.findall(r"^\S.*:.*\n    for batch in loader:.*\n        \.\.\.$", text, flags=re.MULTILINE)
    loader, seen, saved = make(), list[Any](), list[Any]()

    def train(batch: Any) -> None:
        seen.append([part.tolist() for part in batch])
        if len(seen) == 4:
            saved.append(save({"dataloader": loader}))
        if len(seen) == 8:
            load({"dataloader": loader}, saved)

    exec(loop.replace("...", "train(batch)"), {"loader": loader, "epochs": 3, "train": train})
    straight = taken(endless(make()), 18)
    assert seen == straight[:8] + straight[4:]


@pytest.mark.rule("random-state-last")
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (2, 2)])
def test_another_number_of_ranks_goes_on_with_the_samples_that_are_left(before: int, after: int) -> None:
    length, trained = 26, 2

    def run(world: int, steps: int | None, parts: list[Any] | None = None) -> tuple[list[int], list[Any]]:
        seen: list[int] = []
        loaders = [make(length=length, batch=2, rank=rank, world=world) for rank in range(world)]
        for rank, loader in enumerate(loaders):
            if parts is not None:
                load({"dataloader": loader}, parts, rank, world)
            for at, (indices, _) in enumerate(loader, 1):
                seen += indices.tolist()
                if at == steps:
                    break
        return seen, [save({"dataloader": loader}, rank, world) for rank, loader in enumerate(loaders)]

    first, parts = run(before, trained)
    rest, _ = run(after, None, parts)
    assert sorted(first + rest) == list(range(length)), "no sample twice, none left out"


@pytest.mark.rule("random-state-last")
def test_ranks_that_were_not_at_one_position_are_refused() -> None:
    loaders = [make(rank=rank, world=2) for rank in range(2)]
    next(iter(loaders[1]))
    parts = [save({"dataloader": loader}, rank, 2) for rank, loader in enumerate(loaders)]
    with pytest.raises((ValueError, StateMismatchError), match="not at one position"):
        load({"dataloader": make()}, parts)


@pytest.mark.parametrize(("drop_last", "length"), [(False, 24), (True, 21)])
def test_an_epoch_that_the_ranks_cannot_share_evenly(drop_last: bool, length: int) -> None:
    samplers = [ResumableSampler(range(23), rank=rank, world_size=3, drop_last=drop_last) for rank in range(3)]
    shares = [list(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [len(sampler) for sampler in samplers] == [length // 3] * 3
    assert len(set().union(*shares)) == min(length, 23)
    assert list(ResumableSampler(range(2), shuffle=False, rank=4, world_size=5)) == [0], "fewer samples than ranks"
    assert list(ResumableSampler(range(0))) == []


def test_the_order_is_the_same_whatever_the_scripts_default_device_is() -> None:
    sampler = ResumableSampler(list(range(9)), seed=1)
    order = list(sampler)
    again = ResumableSampler(list(range(9)), seed=1)
    with torch.device("meta"):
        assert list(again) == order


def test_the_order_of_another_sampler_is_kept_and_changes_with_the_epoch() -> None:
    weights = torch.arange(1.0, 31.0)
    torch.manual_seed(0)
    sampler = ResumableSampler(WeightedRandomSampler(weights, 40), seed=1)
    state = torch.get_rng_state()
    order = list(sampler)
    assert len(order) == 40
    assert list(sampler) == order
    own = torch.Generator().manual_seed(77)
    with_own = ResumableSampler(WeightedRandomSampler(weights, 40, generator=own), seed=1)
    kept = own.get_state()
    first = list(with_own)
    with_own.set_epoch(1)
    assert list(with_own) != first
    assert torch.equal(own.get_state(), kept)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(ResumableSampler(WeightedRandomSampler(weights, 40), seed=2)) != order


def test_a_position_that_nobody_counts_is_refused_and_not_taken_for_the_truth() -> None:
    sampler = ResumableSampler(range(10))
    assert sampler.state_dict()["position"] == 0
    next(iter(DataLoader(range(10), batch_size=2, sampler=sampler)))
    with pytest.raises(RuntimeError, match="Wrap it, ResumableLoader"):
        sampler.state_dict()


def test_what_cannot_be_counted_or_dealt_out_is_refused() -> None:
    data = list(range(10))
    sampler = ResumableSampler(data)
    with pytest.raises(TypeError, match="RandomSampler"):
        ResumableLoader(DataLoader(data, shuffle=True))
    with pytest.raises(TypeError, match="SequentialSampler"):
        ResumableLoader(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False)))
    with pytest.raises(ValueError, match="in_order"):
        ResumableLoader(DataLoader(data, sampler=sampler, in_order=False, num_workers=1))
    seeded = SeededDataset(data)
    with pytest.raises(ValueError, match="persistent_workers"):
        ResumableLoader(DataLoader(seeded, sampler=sampler, num_workers=1, persistent_workers=True))
    with pytest.raises(TypeError, match="deals out to ranks itself"):
        ResumableSampler(DistributedSampler(data, 2, 0))
    with pytest.raises(TypeError, match="no length"):
        ResumableSampler(iter(data))
    with pytest.raises(ValueError, match="rank 2 is not in a world of 2"):
        ResumableSampler(data, rank=2, world_size=2)
    with pytest.raises(ValueError, match="had 10 samples and has 11"):
        ResumableSampler(range(11)).load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="not the state of a ResumableSampler"):
        sampler.load_state_dict({"position": 1})


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_without_batching_and_incomplete_last_ones_are_counted_as_they_are(drop_last: bool) -> None:
    single = ResumableLoader(DataLoader(range(5), batch_size=None, sampler=ResumableSampler(range(5), shuffle=False)))
    assert taken_one(single, 3) == [0, 1, 2]
    assert single.state_dict()["position"] == 3
    assert [*single] == [3, 4], "a pass that was left goes on where it was"
    assert (single.epoch, single.state_dict()["position"]) == (1, 0)
    sampler = ResumableSampler(range(5), shuffle=False)
    loader = ResumableLoader(DataLoader(range(5), batch_size=2, sampler=sampler, drop_last=drop_last))
    assert len(loader) == (2 if drop_last else 3)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]][: len(loader)]
    assert (loader.epoch, loader.state_dict()["position"]) == (1, 0)


def taken_one(loader: Any, count: int) -> list[int]:
    found = []
    for sample in loader:
        found.append(sample)
        if len(found) == count:
            break
    return found


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_goes_on_where_it_was(workers: int) -> None:
    def loader() -> StatefulDataLoader:
        generator = torch.Generator().manual_seed(4)
        return StatefulDataLoader(range(20), batch_size=3, shuffle=True, num_workers=workers, generator=generator)

    straight = [batch.tolist() for batch in loader()]
    source = loader()
    batches = iter(source)
    first = [next(batches).tolist() for _ in range(3)]
    resumed = loader()
    through_holdfast(source, resumed)
    assert first + [batch.tolist() for batch in resumed] == straight


def torchdata_loader(rank: int, world: int, *, batch: int, workers: int = 0, length: int = 48, every: int = 1) -> Any:
    sampler = StatefulDistributedSampler(range(length), world, rank, seed=5)
    return StatefulDataLoader(
        range(length), batch_size=batch, sampler=sampler, num_workers=workers, snapshot_every_n_steps=every
    )


def torchdata_ranks(world: int, saved: list[Any] | None, count: int | None, **options: Any) -> Any:
    """What each of so many ranks gets in `count` batches, and what they save then."""
    got, states = [], []
    for rank in range(world):
        loader = torchdata_loader(rank, world, **options)
        if saved is not None:
            load({"dataloader": loader}, saved, rank=rank, world_size=world)
        batches = iter(loader)
        taken = [*batches] if count is None else [next(batches) for _ in range(count)]
        got += [sample for batch in taken for sample in batch.tolist()]
        states.append(save({"dataloader": loader}, rank=rank, world_size=world))
    return got, states


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("workers", "every"), [(0, 1), (2, 1), (2, 2)])
def test_torchdatas_loader_goes_on_with_other_numbers_of_ranks_without_losing_or_repeating_a_sample(
    workers: int, every: int
) -> None:
    first, saved = torchdata_ranks(4, None, 3, batch=2, workers=workers, every=every)
    second, saved = torchdata_ranks(2, saved, 3, batch=2, workers=workers, every=every)
    third, saved = torchdata_ranks(1, saved, 1, batch=4)
    again, saved = torchdata_ranks(1, saved, 1, batch=4)
    rest, saved = torchdata_ranks(2, saved, None, batch=2)
    assert sorted(first + second + third + again + rest) == list(range(48))
    epoch, _ = torchdata_ranks(3, saved, None, batch=2)
    assert sorted(epoch) == list(range(48)), "after the end of an epoch the next one is whole"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdatas_loader_is_refused_where_ranks_cannot_share_the_rest_or_the_data_is_other() -> None:
    _, saved = torchdata_ranks(2, None, 1, batch=1)
    with pytest.raises(ValueError, match="2 samples were trained on, and 4 ranks cannot share the rest evenly"):
        torchdata_ranks(4, saved, 1, batch=1)
    with pytest.raises(ValueError, match="had 48 samples and has 60"):
        torchdata_ranks(1, saved, 1, batch=1, length=60)
    _, further = torchdata_ranks(2, saved, 1, batch=1)
    with pytest.raises(ValueError, match="not at one place"):
        torchdata_ranks(1, [saved[0], further[1]], 1, batch=1)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_torchdata_without_such_a_sampler_keeps_its_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torchdata.stateful_dataloader.sampler.StatefulDistributedSampler")
    source, resumed = (StatefulDataLoader(range(6), batch_size=2) for _ in range(2))
    first = next(iter(source)).tolist()
    through_holdfast(source, resumed)
    assert [first, *(batch.tolist() for batch in resumed)] == [[0, 1], [2, 3], [4, 5]]
