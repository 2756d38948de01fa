"""What the recorder sees from a training loop: names that people find again, and nothing that it trips over."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast.state.components import Declarations
from holdfast.verify.fingerprints import flat, state_fingerprint
from holdfast.verify.iterators import IteratorBook
from holdfast.verify.surroundings import Surroundings


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.ema = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.tools = {"noise": np.random.default_rng(1), "coin": random.Random(2)}
        self.order = torch.Generator()
        self.log = Proxy()
        self.loader = DataLoader(range(6), batch_size=2, shuffle=True, generator=self.order)

    def look(self, state: dict[str, Any]) -> Surroundings:
        batch = {"ids": torch.arange(3)}
        output = self.model(torch.ones(1, 2))
        around = Surroundings(sys._getframe(), state)
        del batch, output
        return around


class Proxy:
    """Answers for every name, as a proxy does, and has no state."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: {"asked": name}


class Hostile:
    """Answers every question about it with an error that nobody expects."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"nobody asks for {name}")


def test_what_is_outside_is_found_by_its_name_and_what_is_inside_is_left_out() -> None:
    trainer = Trainer()
    hostile = Hostile()
    around = trainer.look({"model": trainer.model})
    found = {name: (each.kind, each.type) for name, each in around.outside.items() if name.startswith("self.")}
    assert found == {
        "self.ema": ("model", "Linear"),
        "self.optimizer": ("optimizer", "SGD"),
        "self.tools['noise']": ("generator", "Generator"),
        "self.tools['coin']": ("generator", "Random"),
        "self.order": ("data_generator", "Generator"),
    }
    assert around.locals.keys() == {"batch['ids']"}, "computed from parameters is no batch"
    whole = trainer.look({"model": trainer.model, "average": trainer.ema.state_dict(), "optimizer": trainer.optimizer})
    assert "self.ema" not in whole.outside, "its tensors are in the state by another object"
    assert "self.optimizer" not in whole.outside
    del hostile


def test_looking_changes_and_draws_nothing() -> None:
    trainer = Trainer()
    numbers = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), trainer.order.get_state()
    coin = trainer.tools["coin"].getstate()
    first, second = (trainer.look({"model": trainer.model}).outside for _ in range(2))
    assert {name: each.parts for name, each in first.items()} == {name: each.parts for name, each in second.items()}
    after = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), trainer.order.get_state()
    assert numbers[:3] == after[:3]
    assert torch.equal(numbers[3], after[3])
    assert trainer.tools["coin"].getstate() == coin


def test_batches_are_counted_although_no_variable_holds_the_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", _BaseDataLoaderIter.__init__)  # put back afterwards
    book = IteratorBook()
    for _ in DataLoader(range(6), batch_size=2):
        pass
    assert book.batches_given() == []
    counts = []
    for _ in DataLoader(range(6), batch_size=2):
        counts.append(book.batches_given())
    assert counts == [[1], [2], [3]]


def test_fingerprints_tell_bits_apart_and_nothing_else() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "notes": {"seen": [1, (2.5, None)], "text": "x" * 200}}

    def look() -> dict[str, str]:
        return state_fingerprint(state, rank=0, world_size=1, declared=Declarations())[0]

    first = look()
    assert first["optimizer/param_groups[0].lr"] == "0.1"
    assert first["notes/seen[1][0]"] == "2.5"
    assert len(first["notes/text"]) < 80
    assert look() == first
    with torch.no_grad():
        model.weight.view(torch.int32)[0, 0] ^= 1
    second = look()
    assert [name for name in first if first[name] != second[name]] == ["model/weight"]
    nan, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert dict(flat(nan, "")) != dict(flat(other, "")), "bits, not values"
    assert dict(flat(torch.zeros(2), "")) != dict(flat(-torch.zeros(2), ""))
    assert dict(flat({"a": object()}, "")) == {".a": "object"}, "an address is nothing to compare"


def test_a_step_that_holds_its_model_in_a_closure_hides_nothing() -> None:
    def made() -> Any:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.step()
            unset()

        if not model:
            unset = print  # a cell that stays empty
        return step

    def look(made: Callable[[], Any]) -> set[tuple[str, str]]:
        reached = made()
        around = Surroundings(sys._getframe(), {})
        del reached
        return {(name, each.kind) for name, each in around.outside.items() if name.startswith("reached")}

    assert look(made) == {("reached.optimizer", "optimizer")}
    assert look(lambda: partial(made())) == {("reached.func.optimizer", "optimizer")}
    assert look(lambda: Trainer().look) >= {("reached.__self__.model", "model")}
    assert look(lambda: nn.Linear(2, 2).forward) == {("reached.__self__", "model")}
