"""Bytes arrive in the live tensors while they are hashed: what is promised where they turn out to be wrong."""

from __future__ import annotations

import copy
import logging
from unittest import mock

import pytest
import torch
from gloo import run_ranks
from tests.support.damage import chunks_of, files_of, flip
from tests.support.training import Job, values

import holdfast
from holdfast import errors
from holdfast.layout.plan import ChunkSizes
from holdfast.state import destinations as arrivals
from holdfast.state.load import LoadPlan
from holdfast.state.on_device import OnDevice

SIZES = ChunkSizes(own_chunk_bytes=16, cut_bytes=64, pack_bytes=32)
"""Every tensor but the smallest has chunks of its own, and arrives in place."""


@pytest.fixture(autouse=True)
def _saves_are_proven(monkeypatch):
    """Files handed over through the mount would be read again in the background, perhaps before the restore."""
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")


def train(rank, run, kind, steps):
    """Saves each step; all values right after each save, by step."""
    job = Job(rank, kind)
    saved = {}
    with holdfast.Checkpointer(run, chunk_sizes=SIZES) as ckpt:
        ckpt.restore(job.state)
        for step in range(steps):
            job.step(step)
            ckpt.save(step, job.state).committed.result(timeout=60)
            saved[step] = copy.deepcopy(values(job.state))
    return saved


def damage(service, run, tensor, checkpoints, *, rank=None):
    """Flips a bit in the first chunk of `tensor` in each of the newest `checkpoints`; of those that `rank` stored."""
    for view in list(service.client.checkpoints.all(*run.split("/")))[:checkpoints]:
        digest = next(digest for by, digest in chunks_of(service.client, view.id, tensor) if rank in (None, by))
        for path in files_of(service.store, digest):
            flip(path)


TENSORS = ["model/up.weight", "optimizer/model/down.weight/exp_avg"]


@pytest.mark.rule("one-vote-per-step")
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("warm", [False, True], ids=["new slots", "slots that are there"])
def test_a_fallback_leaves_the_earlier_state_bit_for_bit_in_every_tensor(service, run, tensor, warm):
    saved = train(0, run, "plain", 3)
    damage(service, run, tensor, 1)
    job = Job(seed=7)
    if warm:
        for step in range(5):
            job.step(step)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(job.state) == 2
        assert values(job.state) == saved[1]
        job.step(2)
        ckpt.save(2, job.state).committed.result(timeout=60)


def test_tensors_on_a_device_get_each_chunk_when_it_is_verified(service, run, monkeypatch):
    """A stand-in: the host's memory, written as a device's is."""
    saved = train(0, run, "plain", 3)
    damage(service, run, "model/up.weight", 1)
    monkeypatch.setattr(arrivals, "room_in", OnDevice)
    job = Job(seed=7)
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(job.state) == 2
        assert values(job.state) == saved[1]


def restore(rank, run, kind):
    """What came back, and the tensors whose bytes arrived elsewhere."""
    job = Job(rank, kind, seed=7)
    for step in range(2):
        job.step(step)
    elsewhere = []

    def apply(plan, found):
        elsewhere.extend(want.name for want in plan.wanted if want.bytes and not found.is_in_place(want.name))
        return whole_apply(plan, found)

    whole_apply = LoadPlan.apply
    with mock.patch.object(LoadPlan, "apply", apply), holdfast.Checkpointer(run) as ckpt:
        return ckpt.restore(job.state), values(job.state), elsewhere


@pytest.mark.rule("one-vote-per-step")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_damaged_chunk_of_one_rank_makes_both_take_all_of_the_earlier_one(service, run, kind):
    saved = run_ranks(train, 2, run, kind, 3, timeout_seconds=180)
    stored_by = 1 if kind == "fsdp" else None
    damage(service, run, "model/up.weight", 1, rank=stored_by)
    restored = run_ranks(restore, 2, run, kind, timeout_seconds=180)
    for rank, (start, after, elsewhere) in enumerate(restored):
        assert start == 2
        assert after == saved[rank][1]
        assert elsewhere == [f"dataloader@{rank}/generator"], "load_state_dict() is given a tensor of its own"


def test_where_nothing_is_left_the_error_says_that_the_state_is_none_and_nothing_is_saved_from_it(service, run):
    saved = train(0, run, "plain", 2)
    damage(service, run, "model/up.weight", 2)
    job = Job(seed=7)
    before = copy.deepcopy(values(job.state))
    with holdfast.Checkpointer(run) as ckpt:
        with pytest.raises(errors.NoRestorePoint, match="do not train on it"):
            ckpt.restore(job.state)
        after = values(job.state)
        assert after["up.weight"] != before["up.weight"], "its bytes arrived before their digest was known"
        assert after["up.weight"] not in [state["up.weight"] for state in saved.values()]
        for untensored in ("lr_scheduler", "notes", "group0"):
            assert after[untensored] == before[untensored], "what is no tensor comes after the agreement"
        for save in (ckpt.save, ckpt.step):
            with pytest.raises(errors.NotRestored, match="parts of a checkpoint"):
                save(0, job.state)


def test_a_named_step_that_is_damaged_says_so_and_another_one_mends_the_state(service, run):
    saved = train(0, run, "plain", 2)
    damage(service, run, "model/up.weight", 1)
    job = Job(seed=7)
    with holdfast.Checkpointer(run) as ckpt:
        with pytest.raises(errors.HoldfastError) as raised:
            ckpt.restore(job.state, at="1")
        assert any("do not train on it" in note for note in raised.value.__notes__)
        assert ckpt.restore(job.state, at="0") == 1
        assert values(job.state) == saved[0]
        ckpt.save(1, job.state).committed.result(timeout=60)


def restore_where_one_rank_alone_is_half_restored(rank, run):
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(job.state)
        job.step(0)
        ckpt.save(0, job.state).committed.result(timeout=60)
        saved = copy.deepcopy(values(job.state))
        job.step(1)
        if rank == 1:
            ckpt.parts.session.begin_to_restore()  # as a dcp.load leaves it that broke on this rank
        with pytest.raises(errors.ConfigurationError, match="comes too late"):
            ckpt.restore(job.state, at="0")
        assert ckpt.restore(job.state) == 1
        return values(job.state) == saved


@pytest.mark.rule("one-vote-per-step")
def test_a_named_point_is_refused_on_all_ranks_where_one_of_them_is_half_restored(run):
    assert run_ranks(restore_where_one_rank_alone_is_half_restored, 2, run) == [True, True]


def restore_with_another_shape_on_rank_1(rank, run):
    job = Job(rank, loader=False)  # one rank's place is none for two
    if rank == 1:
        job.state["model"].up = torch.nn.Linear(5, 8)
        job.state["optimizer"] = torch.optim.AdamW(job.state["model"].parameters(), lr=0.01)
    before = copy.deepcopy(values(job.state))
    with holdfast.Checkpointer(run) as ckpt:
        try:
            ckpt.restore(job.state)
        except errors.StateMismatchError as error:
            return str(error), values(job.state) == before, getattr(error, "__notes__", [])
    return None


def test_what_does_not_fit_one_rank_is_refused_before_any_rank_is_touched(run):
    train(0, run, "plain", 1)
    for message, untouched, notes in run_ranks(restore_with_another_shape_on_rank_1, 2, run, timeout_seconds=120):
        assert "up.weight" in message
        assert untouched
        assert notes == []


def test_a_second_restore_in_one_process_takes_everything_back(run):
    job = Job()
    with holdfast.Checkpointer(run, chunk_sizes=SIZES) as ckpt:
        ckpt.restore(job.state)
        job.step(0)
        ckpt.save(0, job.state).committed.result(timeout=60)
        saved = copy.deepcopy(values(job.state))
        memory = job.state["model"].up.weight.data_ptr()
        for step in range(1, 4):
            job.step(step)
        assert ckpt.restore(job.state) == 1
        assert values(job.state) == saved
        assert job.state["model"].up.weight.data_ptr() == memory


def test_a_view_of_the_model_that_comes_back_as_a_copy_is_told(run, caplog):
    def state():
        model = torch.nn.Linear(2, 2)
        return {"model": model, "adapter": model.state_dict()}

    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore(first := state())
        ckpt.save(0, first).committed.result(timeout=60)
    resumed = state()
    with holdfast.Checkpointer(run) as ckpt, caplog.at_level(logging.WARNING, "holdfast"):
        assert ckpt.restore(resumed) == 1
    assert "adapter@0/weight (and 1 more) shared memory with another tensor of the state" in caplog.text
    weight, view = resumed["model"].weight, resumed["adapter"]["weight"]
    assert torch.equal(weight, view)
    assert weight.data_ptr() != view.data_ptr()


def test_weights_are_changed_only_when_every_byte_was_verified(service, run):
    train(0, run, "plain", 1)
    damage(service, run, "model/up.weight", 1)
    model = Job(seed=7).state["model"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(errors.HoldfastError):
        holdfast.load_weights(run, model, dtype=torch.float64)
    after = model.state_dict()
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: was.dtype for name, was in before.items()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
