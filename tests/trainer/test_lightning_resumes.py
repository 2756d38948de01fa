"""What a resumed fit of Lightning gets back beside model and optimizer: averages, and the places of its loaders."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from tests.trainer.conftest import Service
from tests.trainer.gloo import run_ranks
from tests.trainer.test_lightning import (
    Kill,
    KillAfter,
    Killed,
    Regression,
    fit_here,
    fitted,
    loader,
    on_two_ranks,
    trainer_of,
)

from holdfast.integrations.lightning import HoldfastCheckpointIO, HoldfastDDPStrategy


def averages_on_two_ranks(rank: int, run: str, folder: str) -> list[list[torch.Tensor]]:
    """At the end of a fit, and of one that was killed; and what is tested of a checkpoint from the end of the fit."""
    _, averages = fit_here("ddp", f"{run}-whole", Path(folder, "whole"), EMAWeightAveraging(decay=0.5))
    with pytest.raises(Killed):
        fit_here("ddp", run, Path(folder, "killed"), EMAWeightAveraging(decay=0.5), Kill(2))
    _, resumed = fit_here("ddp", run, Path(folder, "killed"), EMAWeightAveraging(decay=0.5))
    tester = trainer_of(Path(folder), **on_two_ranks("ddp", run))
    module = Regression()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tester.test(module, loader(), ckpt_path=tester.strategy.last(), verbose=False)
    return [averages, resumed, module.tested]


def test_weight_averages_come_back(run: str, service: Service, tmp_path: Path) -> None:
    project, name = run.split("/")
    service.client.runs.create(project, f"{name}-whole")
    for averages, resumed, tested in run_ranks(averages_on_two_ranks, 2, run, str(tmp_path)):
        for one, *others in zip(averages, resumed, tested, strict=True):
            assert all(torch.equal(one, other) for other in others)


def test_weight_averages_come_back_in_the_dict_of_one_process(run: str, tmp_path: Path) -> None:
    own = {"create": True}
    options: Any = {"plugins": [HoldfastCheckpointIO(f"{run}-whole", checkpointer=own)]}
    whole = fitted(trainer_of(tmp_path / "whole", EMAWeightAveraging(decay=0.5), **options))
    options = {"plugins": [HoldfastCheckpointIO(run)]}
    with pytest.raises(Killed):
        fitted(trainer_of(tmp_path / "killed", EMAWeightAveraging(decay=0.5), Kill(2), **options))
    resumed = fitted(trainer_of(tmp_path / "killed", EMAWeightAveraging(decay=0.5), **options))
    assert len(resumed.seen) < len(whole.seen)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


class Copying(pl.Callback):
    """Makes copies of the module in the middle of a fit."""

    copies: tuple[pl.LightningModule, ...] = ()

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, *_: Any) -> None:
        taken_apart, pl_module.trainer = pl_module.trainer, None  # a Trainer cannot be pickled
        self.copies = (pickle.loads(pickle.dumps(pl_module)), copy.deepcopy(pl_module))
        pl_module.trainer = taken_apart


def test_a_copy_of_the_module_that_is_made_in_mid_fit_has_its_own_hook_alone(run: str, tmp_path: Path) -> None:
    copying = Copying()
    fitted(trainer_of(tmp_path, copying, plugins=[HoldfastCheckpointIO(run)]))
    for each in copying.copies:
        assert each.on_train_batch_end.__self__ is each


class RanksOwn:
    """A stateful loader whose ranks are at different places."""

    def __init__(self, rank: int) -> None:
        self.place = 100 * rank
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for _ in range(4):
            self.place += 1
            yield [torch.ones(2, 4)]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded.append(state["place"])


def loaders_of_ranks(rank: int, run: str, folder: str, end: pl.Callback | None, **options: Any) -> list[int]:
    own = RanksOwn(rank)
    strategy = HoldfastDDPStrategy(run, find_unused_parameters=True, **options)
    trainer = trainer_of(
        Path(folder),
        *([] if end is None else [end]),
        saving=ModelCheckpoint(dirpath=folder, every_n_train_steps=2),
        devices=torch.distributed.get_world_size(),
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        max_epochs=2,
    )
    with nullcontext() if end is None else pytest.raises(Killed):
        trainer.fit(Regression(), own, ckpt_path=strategy.last())
    return own.loaded


def test_each_rank_gets_the_place_of_its_own_loader_and_none_that_of_another(run: str, tmp_path: Path) -> None:
    def fit(world_size: int, end: pl.Callback | None = None, **options: Any) -> list[list[int]]:
        return run_ranks(partial(loaders_of_ranks, **options), world_size, run, str(tmp_path), end)

    fit(2, KillAfter(3))
    with pytest.raises(AssertionError, match="each of 2 ranks saved its own in the middle of an epoch"):
        fit(1)
    assert fit(2, KillAfter(5)) == [[2], [102]]
    assert fit(1) == [[]], "after the end of an epoch"


def test_the_place_of_rank_0s_loader_serves_other_ranks_if_it_is_said_to(run: str, tmp_path: Path) -> None:
    fit = partial(loaders_of_ranks, checkpointer={"replicated": ["checkpoint"]})
    run_ranks(fit, 2, run, str(tmp_path), KillAfter(3))
    assert run_ranks(fit, 1, run, str(tmp_path), None) == [[2]]
