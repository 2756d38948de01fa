"""One process: a save never changes training, a resume gives back every bit, and asking for state touches nothing."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import torch
from tests.support.training import Job, random_numbers, train, values
from torch import nn

import holdfast
from holdfast import errors
from holdfast.save import saver
from holdfast.staging import places
from holdfast.staging.copy import Slab
from holdfast.state.components import capture_rng
from holdfast.state.tree import decode_tree, encode_tree


def test_resume_is_bit_for_bit_what_an_uninterrupted_run_would_be(run):
    whole = train(0, None, 9)
    first = train(0, run, 5, every=2)
    second = train(0, run, 9, every=2, seed=7)  # another seed: nothing may come from the fresh objects
    assert second.start == 4, "steps 0 to 3 are saved; 4 was run and not saved"
    assert first.losses[4] == second.losses[4]
    assert {**first.losses, **second.losses} == whole.losses
    assert second.final == whole.final
    assert second.rng == whole.rng


@pytest.mark.rule("random-state-last")
def test_a_resume_with_fewer_gpus_visible_derives_cudas_numbers_and_says_so(run, monkeypatch, caplog):
    generators = encode_tree({**decode_tree(capture_rng()), "cuda": [b"first", b"second"]}, path="rng")
    expected = random_numbers()
    monkeypatch.setattr(saver, "capture_rng", lambda: generators)
    job, resumed = Job(), Job(seed=7)
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state)
        job.step(0)
        ckpt.save(0, job.state).committed.result(timeout=60)
    saved, seeds = copy.deepcopy(values(job.state)), []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    with caplog.at_level(logging.INFO, logger="holdfast"), holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(resumed.state) == 1
        assert random_numbers() == expected
    assert values(resumed.state) == saved
    assert len(seeds) == 1
    assert caplog.text.count("CUDA's random numbers derived anew from run, step and rank") == 1


@pytest.mark.rule("staging-slabs")
def test_a_job_in_host_memory_on_a_host_with_gpus_asks_nothing_of_cuda(run, monkeypatch):
    """This torch may have no CUDA: the first call that begins it would fail. Each rank would take a context for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("CUDA begins"))
    whole, first, resumed = train(0, None, 5), train(0, run, 3, every=1), train(0, run, 5, every=1, seed=7)
    assert resumed.start == 3
    assert first.losses | resumed.losses == whole.losses
    assert resumed.final == whole.final
    assert not torch.cuda.is_initialized()


@pytest.mark.rule("capture-changes-nothing")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum"])
def test_saving_every_step_leaves_every_loss_and_parameter_as_without_saving(run, optimizer):
    without = train(0, None, 6, optimizer=optimizer)
    with_saves = train(0, run, 6, every=1, optimizer=optimizer)
    assert with_saves.committed == list(range(6))
    assert with_saves.losses == without.losses
    assert with_saves.final == without.final
    assert with_saves.rng == without.rng


@pytest.mark.rule("capture-changes-nothing")
def test_saving_with_two_optimizers_steps_neither(run):
    def trained(ckpt=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        state = {
            "model": model,
            "first": torch.optim.AdamW(model[0].parameters()),
            "second": torch.optim.SGD(model[1].parameters(), lr=0.1),
        }
        if ckpt is not None:
            assert ckpt.restore(state) == 0
        losses = []
        for step in range(5):
            loss = model(torch.randn(3, 4)).pow(2).mean()
            loss.backward()
            if step % 2:
                state["first"].step()
            state["second"].step()
            model.zero_grad()
            losses.append(float(loss))
            if ckpt is not None:
                ckpt.save(step, state).committed.result(timeout=60)
        slots = {n: {k: v.tolist() for k, v in s.items()} for n, s in enumerate(state["first"].state.values())}
        return losses, [parameter.tolist() for parameter in model.parameters()], slots

    with holdfast.Checkpointer(run) as ckpt:
        assert trained(ckpt) == trained()


@pytest.mark.rule("capture-changes-nothing")
def test_restore_in_an_empty_run_touches_nothing(run):
    job = Job(optimizer="sgd")
    before, drawn = values(job.state), random_numbers()
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(job.state) == 0
    assert values(job.state) == before
    assert random_numbers() == drawn
    assert not job.state["optimizer"].state


@pytest.mark.rule("capture-changes-nothing")
def test_asking_a_fresh_optimizer_for_its_state_does_not_step_it(run):
    job = Job(optimizer="momentum")
    before = copy.deepcopy(values(job.state))
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state)
        ckpt.save(0, job.state).committed.result(timeout=60)
    assert values(job.state) == before
    assert not job.state["optimizer"].state


@pytest.mark.rule("capture-changes-nothing")
def test_the_first_use_of_the_library_draws_no_random_number():
    script = (
        "import random, holdfast; random.seed(3); before = random.getstate(); "
        "holdfast.Checkpointer, holdfast.errors, holdfast.load_weights; sys = __import__('sys'); "
        "sys.exit(random.getstate() != before)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.rule("capture-changes-nothing")
def test_retries_in_the_background_draw_no_random_number(own_service):
    with holdfast.Checkpointer("tests/retries", create=True) as ckpt:
        ckpt.restore({})
        before = random_numbers()
        own_service.served.process.stop()
        assert ckpt.save(0, {}).committed.exception(timeout=60) is not None
        assert random_numbers() == before


@pytest.mark.rule("typed-trees")
def test_what_plain_json_would_change_comes_back_as_it_was(run):
    kept = {"tuple": (1, 2), 3: "int key", "inf": float("inf"), "bytes": b"\x00\xff", "set": {1, 2}, "none": None}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({"notes": {}})
        ckpt.save(0, {"notes": kept}).committed.result(timeout=60)
    state = {"notes": {"other": 1}}
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(state) == 1
    assert state["notes"] == kept
    assert {type(key) for key in state["notes"]} == {str, int}


@pytest.mark.rule("random-state-last")
def test_the_random_numbers_are_restored_after_everything_that_draws(run):
    class Draws:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            torch.rand(3)

    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({"draws": Draws()})
        ckpt.save(0, {"draws": Draws()}).committed.result(timeout=60)
        expected = torch.rand(2)
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({"draws": Draws()})
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.rule("refuse-inexact")
@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"deep": [threading.Lock()]}, "odd.deep[0]"),
        ({"fn": print}, "odd.fn"),
        (torch.eye(3).to_sparse(), "odd"),
    ],
)
def test_an_object_that_cannot_be_kept_is_refused_by_its_key(run, value, key):
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({})
        with pytest.raises(holdfast.errors.UnsupportedStateError) as refused:
            ckpt.save(0, {"odd": value})
        assert key.split(".")[-1] in str(refused.value)
        assert "odd" in str(refused.value)
        # The refusal leaves the checkpointer as good as before.
        ckpt.save(0, {"fine": 1}).committed.result(timeout=60)


def test_an_empty_state_is_a_checkpoint_like_any_other(run):
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore({}) == 0
        ckpt.save(3, {}).committed.result(timeout=60)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore({}) == 4


def test_ten_thousand_tensors_come_back(run):
    def many(seed):
        torch.manual_seed(seed)
        return {"many": {f"t{at}": torch.randn(at % 7, 3) for at in range(10_000)}}

    with holdfast.Checkpointer(run, replicated=["many"]) as ckpt:
        ckpt.restore(many(1))
        ckpt.save(0, many(0)).committed.result(timeout=120)
    state = many(2)
    with holdfast.Checkpointer(run, replicated=["many"]) as ckpt:
        assert ckpt.restore(state) == 1
    expected = many(0)["many"]
    assert all(torch.equal(state["many"][name], tensor) for name, tensor in expected.items())


def test_metrics_that_are_not_finite_are_accepted_and_marked(run, service):
    metrics = {"loss": float("nan"), "norm": torch.tensor(float("inf")), "ok": 1.5, "count": 3}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({})
        view = ckpt.save(0, {}, metrics=metrics).committed.result(timeout=60)
    assert view.metrics["loss"].nonfinite == "nan"
    assert view.metrics["norm"].nonfinite == "inf"
    assert (view.metrics["ok"].value, view.metrics["count"].value) == (1.5, 3.0)


def test_a_metric_that_is_no_number_is_refused_by_name(run):
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({})
        with pytest.raises(TypeError, match="'words'"):
            ckpt.save(0, {}, metrics={"words": "many"})


def test_the_state_may_change_as_soon_as_save_returns(run):
    state = {"values": {"weights": torch.zeros(1_000_000)}}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(state)
        handle = ckpt.save(0, state)
        assert handle.staged.done()
        state["values"]["weights"].fill_(7)
        handle.committed.result(timeout=60)
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(state)
    assert not state["values"]["weights"].any()


def test_what_did_not_change_is_not_sent_again(run):
    state = {"frozen": {"base": torch.randn(3_000_000)}, "adapter": {"small": torch.zeros(4)}}
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(state)
        first = ckpt.save(0, state).committed.result(timeout=60)
        state["adapter"]["small"] += 1
        second = ckpt.save(1, state).committed.result(timeout=60)
    assert first.uploaded_bytes > 12_000_000
    assert second.uploaded_bytes < 100_000


def test_a_named_step_is_loaded_and_what_came_after_is_never_latest_again(run):
    train(0, run, 4)
    back = train(0, run, 3, at="1")
    assert back.start == 2
    # Step 3 of the first attempt is detached now.
    assert train(0, run, 3).start == 3


@pytest.fixture
def slabs(monkeypatch):
    """The bytes of each staging slab that is made."""
    made = []

    class Noted(Slab):
        def __init__(self, capacity_bytes, **options):
            super().__init__(capacity_bytes, **options)
            made.append(capacity_bytes)

    monkeypatch.setattr(places, "Slab", Noted)
    return made


def test_the_first_saves_memory_is_made_after_the_first_step(run, slabs):
    """Else that save would hold training until the system has found it."""
    model, asked = nn.Linear(1000, 1000), []

    class Loader:
        def state_dict(self):
            asked.append("state_dict")
            return {"order": torch.arange(100)}

        def load_state_dict(self, _state):
            raise AssertionError

    state = {"model": model, "loader": Loader()}
    with holdfast.Checkpointer(run, save=holdfast.Every(minutes=60)) as ckpt:
        ckpt.restore(state)
        asked.clear()
        ckpt.step(0, state)
        while not slabs:
            time.sleep(0.01)
        assert asked == [], "no script expects that before a save"
        ckpt.save(1, state).committed.result(timeout=60)
        ckpt.step(2, state)
    assert slabs == [4_004_000 + 4_004_000 // 64]


def test_a_state_that_cannot_be_saved_is_refused_by_the_first_save_and_not_by_the_step_before(run, slabs):
    state = {"weights": torch.eye(2).to_sparse()}
    with holdfast.Checkpointer(run, save=holdfast.Every(minutes=60)) as ckpt:
        ckpt.restore({})
        ckpt.step(0, state)
        with pytest.raises(errors.UnsupportedStateError, match="sparse"):
            ckpt.save(1, state)
    assert slabs == []


@pytest.mark.rule("local-save-flag")
def test_a_step_that_is_not_due_makes_a_few_calls_of_functions(run):
    """Some microseconds; counted, for a machine's pace is no matter of a test."""
    with holdfast.Checkpointer(run, save=holdfast.Every(minutes=60)) as ckpt:
        state = {}
        ckpt.restore(state)
        ckpt.step(0, state)
        loss = torch.tensor(1.0)
        calls = Counter()
        sys.setprofile(lambda _frame, event, _argument: calls.update([event]))
        try:
            for step in range(1, 101):
                ckpt.step(step, state, metrics={"loss": loss})
        finally:
            sys.setprofile(None)
        assert (calls["call"] + calls["c_call"]) / 100 < 30


def test_saving_by_the_clock_saves_when_the_time_is_over(run):
    with holdfast.Checkpointer(run, save=holdfast.Every(minutes=0.3 / 60)) as ckpt:
        ckpt.restore({})
        step = 0
        while ckpt.stats.committed < 2:
            ckpt.step(step, {})
            step += 1
            time.sleep(0.01)
    assert ckpt.stats.failed == 0


def test_the_exported_names_are_these():
    assert sorted(holdfast.__all__) == [
        "Auto",
        "Best",
        "Checkpointer",
        "ChunkSizes",
        "Every",
        "LoadReport",
        "LossSpike",
        "OnPreemption",
        "Preempted",
        "Progress",
        "SaveHandle",
        "SaveState",
        "SaveStats",
        "data",
        "dcp_reader",
        "errors",
        "load_pretrained",
        "load_weights",
        "safe_open",
    ]
    assert all(getattr(holdfast, name) is not None for name in holdfast.__all__)


@pytest.mark.parametrize("wrong", [{}, {"steps": 1, "minutes": 1}, {"steps": 0}, {"steps": 1.5}, {"minutes": -1}])
def test_an_interval_that_cannot_be_meant_is_refused(wrong):
    with pytest.raises(holdfast.errors.ConfigurationError):
        holdfast.Every(**wrong)


def test_every_hundred_steps_saves_the_last_of_each_hundred():
    every = holdfast.Every(steps=100)
    assert [step for step in range(300) if every.due_after(step)] == [99, 199, 299]


def test_a_loop_that_counts_by_twos_saves_after_the_first_step_behind_each_round(run):
    """As Lightning counts two optimizers. The round goes on across a resume."""
    saved = []
    for steps in (range(2, 8, 2), range(8, 14, 2)):
        with holdfast.Checkpointer(run, save=holdfast.Every(steps=4)) as ckpt:
            ckpt.restore({})
            for step in steps:
                if (handle := ckpt.step(step, {})) is not None:
                    saved.append(handle.committed.result(timeout=60).step)
    assert saved == [4, 8, 12]


@pytest.mark.parametrize(("saved", "live"), [("adamw", "momentum"), ("momentum", "adamw"), ("sgd", "adamw")])
def test_the_state_of_another_kind_of_optimizer_is_refused_and_nothing_is_touched(run, saved, live):
    train(0, run, 2, optimizer=saved)
    job = Job(optimizer=live)
    before = values(job.state)
    with holdfast.Checkpointer(run) as ckpt, pytest.raises(holdfast.errors.StateMismatchError, match="another kind"):
        ckpt.restore(job.state)
    assert values(job.state) == before
