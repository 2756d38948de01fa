"""transformers' own Trainer, with its checkpoints in a run. See examples/hf.py for one that is killed."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.scheduler import AcceleratedScheduler
from tests.support.damage import chunks_of, files_of, flip
from tests.support.forked import run_forked
from tests.support.serve import ENTRY_POINT
from tests.trainer.conftest import Service
from tests.trainer.gloo import run_ranks
from tests.trainer.roundtrip import load, save
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
    set_seed,
)

import holdfast
from holdfast.errors import ConfigurationError, HoldfastError, SaveDeclined, SaveFailed
from holdfast.integrations.accelerate import training_state
from holdfast.integrations.hf import HoldfastTrainer, HoldfastTrainerMixin, beyond_limit
from holdfast.integrations.hf_files import ModelFiles
from holdfast.integrations.trash import Trash
from holdfast.save.job import SaveHandle
from holdfast_client.settings import ClientSettings
from holdfast_protocol.runs import parse_run
from holdfast_protocol.states import AttemptOutcome, CheckpointKind, CheckpointState

STEPS = 12
EMBEDDING = "model/transformer.wte.weight"


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(0, 32, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[at], "labels": self._tokens[at]}


def trainer_of(checkpointer: holdfast.Checkpointer, folder: Path, **options: Any) -> HoldfastTrainer:
    """9 batches an epoch: 12 steps of it end within the second."""
    set_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.05,
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "data_seed": 3,
    } | options
    return HoldfastTrainer(
        model,
        TrainingArguments(**arguments),
        train_dataset=Texts(18, seed=0),
        eval_dataset=Texts(4, seed=9),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=50)] if "metric_for_best_model" in options else None,
        checkpointer=checkpointer,
    )


def losses(trainer: Any) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


class Killed(Exception):
    """As good as a kill: nothing of Trainer's own end is run, and what is in memory is thrown away."""


class RateLimit(TrainerCallback):
    """Each save is over before the next step, so that none is declined; after step `last` the job is killed."""

    def __init__(self, checkpointer: holdfast.Checkpointer, last: int | None = None) -> None:
        self._checkpointer = checkpointer
        self._last = last

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._checkpointer.wait()
        if state.global_step == self._last:
            raise Killed


@pytest.mark.rule("sharded-hooks")
def test_a_killed_trainer_goes_on_bit_for_bit_from_what_can_be_read(
    run: str, service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Checkpointer(run + "-whole", save=holdfast.Every(steps=100), create=True) as checkpointer:
        whole = trainer_of(checkpointer, tmp_path / "whole")
        whole.train(resume_from_checkpoint=True)
    with pytest.raises(Killed), holdfast.Checkpointer(run, save=holdfast.Every(steps=5)) as checkpointer:  # noqa: PT012
        first = trainer_of(checkpointer, tmp_path / "first")
        first.add_callback(RateLimit(checkpointer, last=11))
        first.train(resume_from_checkpoint=True)
    project, name = run.split("/")
    newest = service.client.checkpoints.select(project, name, "latest")
    rotten = [
        path
        for _, digest in chunks_of(service.client, newest.id, EMBEDDING)
        for path in files_of(service.store, digest)
    ]
    with holdfast.Checkpointer(run, save=holdfast.Every(steps=5)) as checkpointer:
        second = trainer_of(checkpointer, tmp_path / "second")
        second.add_callback(RateLimit(checkpointer))
        get_loader = second.get_train_dataloader

        def rot_and_get_loader() -> Any:
            # The progress of step 9 was read, and Trainer counts its batches by it.
            while rotten:
                flip(rotten.pop())
            return get_loader()

        monkeypatch.setattr(second, "get_train_dataloader", rot_and_get_loader)
        second.train(resume_from_checkpoint=True)
    assert "step 9 could not be read whole, and step 8 was restored" in caplog.text
    assert losses(second) == losses(whole)
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert second.state.total_flos == whole.state.total_flos
    # 9 was due by the Checkpointer; 4, 8 and 12 by Trainer, with the evaluation of that step.
    views = {each.step: each for each in service.client.checkpoints.all(project, name)}
    assert newest.step == 9
    assert set(views) == {4, 8, 9, 12}
    assert math.isfinite(views[8].metrics["eval_loss"].value)  # type: ignore[union-attr]
    assert not list(tmp_path.glob("*/checkpoint-*")), "Trainer wrote a folder of its own"


class Leave(TrainerCallback):
    """The machine tells the job to leave, in the middle of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_best_model_and_the_limit_survive_a_preemption(run: str, service: Service, tmp_path: Path) -> None:
    options = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "save_total_limit": 2,
        "save_steps": 2,
    }
    policy = holdfast.OnPreemption()
    with pytest.raises(holdfast.Preempted), holdfast.Checkpointer(run, save=policy) as checkpointer:  # noqa: PT012
        first = trainer_of(checkpointer, tmp_path, **options)
        first.add_callback(RateLimit(checkpointer))
        first.add_callback(Leave(5))
        first.train(resume_from_checkpoint=True)
    project, name = run.split("/")
    told = service.client.attempts.get(project, name, 1)
    assert told.outcome == AttemptOutcome.PREEMPTED
    emergency = service.client.checkpoints.select(project, name, "latest")
    assert (emergency.step, emergency.kind) == (first.state.global_step, CheckpointKind.EMERGENCY)
    assert emergency.step in (5, 6), "the step that the signal came in, or the one after it"

    with holdfast.Checkpointer(run, save=policy) as checkpointer:
        second = trainer_of(checkpointer, tmp_path, **options)
        second.add_callback(RateLimit(checkpointer))
        second.train(resume_from_checkpoint=True)
    evaluated = {each["step"]: each["eval_loss"] for each in second.state.log_history if "eval_loss" in each}
    best = min(evaluated, key=evaluated.__getitem__)
    assert len(evaluated) == 6
    assert second.state.best_global_step == best == 2, "before the preemption"
    expected = trainer_of(checkpointer, tmp_path).model
    holdfast.load_weights(f"{run}@{best}", expected)
    for one, other in zip(expected.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    kept = {each.step for each in service.client.checkpoints.all(project, name, state=CheckpointState.COMMITTED)}
    assert kept == {best, 12, 10, emergency.step}, "the limit; the two newest; what an attempt resumed from"


class Seen(torch.nn.Module):
    """Remembers the numbers of the samples that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[list[int]] = []

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(number.tolist())
        return {"loss": (self.weight * number).mean()}


def samples_seen(
    rank: int, run: str, folder: str, batch_size: int, last: int | None, **options: Any
) -> list[list[int]]:
    """Of 64 samples, by a job that is killed before step `last`. Four a step are 16 steps an epoch."""
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=16,
        per_device_train_batch_size=batch_size,
        save_strategy="steps",
        save_steps=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    model = Seen()
    with holdfast.Checkpointer(run, save=holdfast.OnPreemption()) as checkpointer:
        trainer = HoldfastTrainer(
            model, arguments, train_dataset=[{"number": at} for at in range(64)], checkpointer=checkpointer
        )
        trainer.add_callback(RateLimit(checkpointer, last))
        with nullcontext() if last is None else pytest.raises(Killed):
            trainer.train(resume_from_checkpoint=True)
    return model.seen


def test_ranks_of_another_number_see_each_sample_of_the_epoch_once(run: str, tmp_path: Path) -> None:
    seen: list[int] = []
    for world_size, last, steps in [(1, 6, range(4)), (2, 9, range(4, 8)), (2, None, range(8, 16))]:
        for batches in run_ranks(samples_seen, world_size, run, str(tmp_path), 4 // world_size, last):
            seen += [number for _, batch in zip(steps, batches, strict=False) for number in batch]
    assert sorted(seen) == [*range(64)]


def test_a_step_of_another_number_of_samples_is_said_because_trainer_skips_other_samples_then(
    run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice the ranks are twice the samples, as twice the batch is."""
    samples_seen(0, run, str(tmp_path), 4, 5)
    samples_seen(0, run, str(tmp_path), 2, 9, gradient_accumulation_steps=2)
    samples_seen(0, run, str(tmp_path), 8, 9, ignore_data_skip=True)
    assert "samples a step" not in caplog.text
    samples_seen(0, run, str(tmp_path), 8, 9)
    assert "took 4 samples a step, and this one takes 8" in caplog.text
    assert "leaves out samples that were not trained" in caplog.text


@pytest.mark.parametrize(
    ("failure", "saved_again"), [(SaveFailed("in the background"), []), (SaveDeclined("busy"), [4])]
)
def test_a_save_that_failed_on_one_rank_alone_does_not_make_it_save_again(
    failure: HoldfastError, saved_again: list[int]
) -> None:
    """The other ranks have not heard of it yet, and save() is for all of them."""
    handle, again, saved = SaveHandle(4), list[int](), list[int]()
    handle.fail(failure)
    trainer: Any = SimpleNamespace(
        checkpointer=SimpleNamespace(step=lambda *_: handle, save=lambda step, *_: again.append(step)),
        _stepped=None,
        _save_is_due=True,
        _progress=SimpleNamespace(saved=saved),
        _saved=lambda step, _: saved.append(step),
        _training_state=lambda saving: {},
        _metrics=dict,
    )
    HoldfastTrainerMixin._after_step(trainer, 4)
    assert again == saved_again
    assert saved == [4]


def test_training_ends_with_the_last_weights_where_the_best_step_has_diverged_or_was_never_committed(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    with holdfast.Checkpointer(run, save=holdfast.OnPreemption(), check_finite=True) as checkpointer:
        checkpointer.restore({"model": model})
        torch.nn.init.constant_(model.weight, math.nan)
        checkpointer.save(3, {"model": model})
        torch.nn.init.ones_(model.weight)
        for best in (3, 5):
            state = SimpleNamespace(best_global_step=best, best_model_checkpoint=f"{run}@{best}")
            trainer: Any = SimpleNamespace(state=state, model=model, checkpointer=checkpointer, _preempted=None)
            trainer._trainer = trainer
            HoldfastTrainerMixin._load_best_model(trainer)
            assert f"{run}@{best}, could not be loaded, and the last weights stay" in caplog.text
            assert model.weight.tolist() == [[1, 1], [1, 1]]


def test_what_the_limit_means_is_said_once_with_commands_that_work(
    run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with holdfast.Checkpointer(run) as checkpointer, caplog.at_level("INFO", "holdfast"):
        trainer_of(checkpointer, tmp_path)
        assert "save_total_limit" not in caplog.text
        trainer_of(checkpointer, tmp_path, save_total_limit=3)
    [said] = [each.getMessage() for each in caplog.records if "save_total_limit" in each.getMessage()]
    commands = re.findall(r"`holdfast ([^`]+)`", said)
    assert commands == [f"retention plan {run}", f"policies put retention {run} --keep-last 3"]
    for command in commands:
        run_forked(ENTRY_POINT, command.split(), environment=os.environ).check_returncode()


def test_the_limit_is_that_of_the_trainer() -> None:
    assert beyond_limit([4, 8, 12, 16], 2, best=None) == [4, 8]
    assert beyond_limit([4, 8, 12, 16], 2, best=4) == [8, 12]
    assert beyond_limit([4, 8, 12, 16], 1, best=16) == [4, 8, 12]
    assert beyond_limit([4, 8, 12, 16], 1, best=8) == [4, 12], "the best and the last"


class FullDisk:
    """A tokenizer, and there is room for half of it."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text('{"model": ')
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_save_neither_fails_for_a_file_beside_the_weights_nor_keeps_half_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    assert ModelFiles(model, FullDisk()).state_dict()["hf_files"].keys() == {"config.json", "generation_config.json"}
    assert "a part of config and tokenizer is not kept" in caplog.text
    assert "No space left on device" in caplog.text
    model.config.own = object()  # which is no JSON
    assert ModelFiles(model).state_dict()["hf_files"].keys() == {"generation_config.json"}
    del model.config.own
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert ModelFiles(model).state_dict() == {}


def greedy() -> Any:
    return get_scheduler("greedy", torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))


def accelerated() -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), optimizer, step_with_optimizer=False)


@pytest.mark.parametrize(("scheduler", "arguments"), [(greedy, [1.0]), (accelerated, [])])
def test_a_scheduler_that_is_none_of_torchs_goes_on_with_another_number_of_ranks(
    scheduler: Callable[[], Any], arguments: list[float]
) -> None:
    stepped, fresh = scheduler(), scheduler()
    stepped.step(*arguments)
    assert fresh.state_dict() != stepped.state_dict()
    load({"lr_scheduler": fresh}, [save({"lr_scheduler": stepped}, rank, 2) for rank in range(2)])
    assert fresh.state_dict() == stepped.state_dict()


def save_steps(run: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the service, which hashes what it writes: only then may an older one go at once."""
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
    with holdfast.Checkpointer(run) as checkpointer:
        checkpointer.restore({})
        for step in range(count):
            checkpointer.save(step, {}).committed.result(timeout=60)


def kept(service: Service, run: str) -> set[int]:
    committed = service.client.checkpoints.all(*run.split("/"), state=CheckpointState.COMMITTED)
    return {each.step for each in committed}


def test_what_a_save_replaces_goes_once_that_save_is_committed_and_if_it_fails_together_with_it(
    run: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best so far must not go for a better one that a failure or the end of the job has taken."""
    save_steps(run, 8, monkeypatch)
    fails, commits, last, never = (SaveHandle(step) for step in (8, 9, 10, 11))
    first = Trash(ClientSettings(), parse_run(run), "the limit")
    first.drop([0], fails)
    first.drop([1], commits)
    assert kept(service, run) == {*range(8)}
    fails.fail(SaveFailed("the store was away"))
    commits.committed.set_result(SimpleNamespace())  # type: ignore[arg-type]
    first.drop([0, 2], last)
    first.drop([3], never)
    last.committed.set_result(SimpleNamespace())  # type: ignore[arg-type]
    first.close()
    assert kept(service, run) == {0, 3, 4, 5, 6, 7}
    second = Trash(ClientSettings(), parse_run(run), "the limit")
    second.drop([0], fails)
    second.drop([8], last)
    second.close()
    assert kept(service, run) == {3, 4, 5, 6, 7}


def test_what_a_person_takes_back_from_the_trash_is_not_put_there_again(
    run: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer names every step beyond its limit at each save."""
    save_steps(run, 4, monkeypatch)
    trash = Trash(ClientSettings(), parse_run(run), "the limit")
    trash.drop([0])
    while 0 in kept(service, run):
        time.sleep(0.05)
    service.client.checkpoints.undelete(service.client.checkpoints.select(*run.split("/"), "0").id)
    trash.drop([0, 1])
    trash.close()
    assert kept(service, run) == {0, 2, 3}


def test_what_the_run_has_left_behind_is_no_longer_the_frameworks_to_delete(
    run: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch was kept by a person's choice of an older step, and a relaunched Trainer knows its steps."""
    save_steps(run, 7, monkeypatch)
    with holdfast.Checkpointer(run) as checkpointer:
        assert checkpointer.restore({}, at="3") == 4
        for step in (4, 8, 9):
            checkpointer.save(step, {}).committed.result(timeout=60)
    trash = Trash(ClientSettings(), parse_run(run), "the limit")
    trash.drop([2, 4, 5, 6])
    trash.close()
    left = service.client.checkpoints.all(*run.split("/"), state=CheckpointState.COMMITTED)
    assert {(each.step, each.attempt) for each in left} == {*((at, 1) for at in (0, 1, 3, 4, 5, 6)), (8, 2), (9, 2)}


def test_accelerate_says_once_that_gradients_under_way_are_in_no_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    lists: dict[str, Any] = {
        f"_{each}s": [] for each in ("model", "optimizer", "scheduler", "dataloader", "custom_object")
    }
    accelerator: Any = SimpleNamespace(**lists, distributed_type=None, scaler=None, is_main_process=True, step=2)
    place = training_state(accelerator)["accelerator"]
    accelerator.sync_gradients = True
    assert place.state_dict() == {"step": 2}
    assert not caplog.text
    accelerator.sync_gradients, accelerator.step = False, 3
    again = training_state(accelerator)["accelerator"]
    assert [each.state_dict() for each in (place, again)] == [{"step": 3}] * 2
    assert caplog.text.count("sync_gradients is true") == 1


def stateful_loader(*, use_seedable_sampler: bool = True) -> tuple[Any, Any]:
    """A shuffled loader of 8 batches, and its component of the state."""
    configuration = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=use_seedable_sampler)
    accelerator = Accelerator(dataloader_config=configuration)
    numbers = torch.utils.data.TensorDataset(torch.arange(16))
    loader = accelerator.prepare(torch.utils.data.DataLoader(numbers, batch_size=2, shuffle=True))
    return loader, training_state(accelerator)["dataloader"]


def test_a_stateful_loader_of_accelerate_goes_on_with_its_place_and_its_order() -> None:
    torch.manual_seed(1)
    loader, position = stateful_loader()
    order, saved, between = [], [], []
    for _ in range(3):
        for (batch,) in loader:
            order.append(batch.tolist())
            saved.append(position.state_dict())
        between.append(position.state_dict())
    torch.manual_seed(2)
    for state, done in [(saved[10], 11), (saved[15], 16), (between[1], 16)]:
        again, position = stateful_loader()
        position.load_state_dict(state)
        assert position.state_dict() == {**state, "iteration": done // 8}
        resumed = [batch.tolist() for _ in range(2) for (batch,) in again]
        assert resumed[: 24 - done] == order[done:]


def test_a_stateful_loader_whose_sampler_draws_another_order_after_a_resume_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="use_seedable_sampler=True"):
        stateful_loader(use_seedable_sampler=False)
