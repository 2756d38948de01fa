"""`frozen=`: what the user declares frozen is staged and hashed once, comes back bit for bit, and is caught when it
changes all the same."""

from __future__ import annotations

import logging

import pytest
import torch
from gloo import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast import errors
from holdfast.layout.plan import ChunkSizes
from holdfast.staging import copy as frozen
from holdfast.staging.copy import same_bits
from holdfast_client.shard_writer import ShardWriter

SIZES = ChunkSizes(1024, 4096, 2048)


class Lora(nn.Module):
    """A base that stays as it is, with a tied pair in it, and an adapter that is trained."""

    def __init__(self):
        super().__init__()
        self.base = nn.ModuleDict({f"layer{at}": nn.Linear(40, 40) for at in range(4)})
        self.base["layer3"].weight = self.base["layer0"].weight
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(40, 3)

    def step(self):
        with torch.no_grad():
            for parameter in self.adapter.parameters():
                parameter.add_(1.0)


def job(seed=0):
    torch.manual_seed(seed)
    model = Lora()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def weights(state):
    return {name: tensor.tolist() for name, tensor in state["model"].state_dict().items()}


def checkpointer(run, frozen=("model/base.*",), **more):
    return holdfast.Checkpointer(run, frozen=frozen, chunk_sizes=SIZES, create=True, **more)


@pytest.fixture
def offered(monkeypatch):
    """What each save has offered: the number of chunks whose digest was known, and of those that were hashed."""
    saves = []
    upload = ShardWriter.upload_and_seal

    def watched(writer, chunks, describe, **limits):
        chunks = list(chunks)
        saves.append((sum(chunk.digest is not None for chunk in chunks), sum(chunk.digest is None for chunk in chunks)))
        return upload(writer, iter(chunks), describe, **limits)

    monkeypatch.setattr(ShardWriter, "upload_and_seal", watched)
    return saves


def test_a_second_save_hashes_nothing_that_is_declared_frozen_and_comes_back_bit_for_bit(run, offered):
    state = job()
    with checkpointer(run) as ckpt:
        assert ckpt.restore(state) == 0
        first = ckpt.save(0, state).committed.result(timeout=60)
        state["model"].step()
        second = ckpt.save(1, state).committed.result(timeout=60)
    base_bytes = sum(p.nbytes for p in state["model"].base.parameters())
    assert second.logical_bytes == first.logical_bytes > base_bytes
    assert second.uploaded_bytes <= first.uploaded_bytes - base_bytes
    (known, hashed), (known_again, hashed_again) = offered
    assert (known, known_again) == (0, 3 * 2 + 1), "three matrices of two chunks each, and the biases"
    assert hashed_again == hashed - known_again
    expected = weights(state)
    state = job(seed=1)
    with checkpointer(run) as ckpt:
        assert ckpt.restore(state) == 2
    assert weights(state) == expected


def test_a_declared_tensor_that_changes_is_named_and_its_new_bytes_are_committed(run, offered, caplog):
    state = job()
    with checkpointer(run) as ckpt:
        ckpt.restore(state)
        ckpt.save(0, state).committed.result(timeout=60)
        with torch.no_grad():
            state["model"].base["layer1"].weight[0, 0] = 42.0
        with caplog.at_level(logging.ERROR, "holdfast"):
            ckpt.save(1, state).committed.result(timeout=60)
        assert "'model/base.layer1.weight' is declared frozen" in caplog.text
        state["model"].base["layer1"].weight.data[0, 0] = 43.0
        ckpt.save(2, state).committed.result(timeout=60)
    assert [known for known, _ in offered] == [0, 5, 5]
    expected = weights(state)
    state = job(seed=1)
    with checkpointer(run) as ckpt:
        assert ckpt.restore(state) == 3
    assert weights(state) == expected


def test_a_restore_is_no_change_and_what_it_loads_is_staged(run, offered, caplog):
    state = job()
    expected = weights(state)
    with checkpointer(run) as ckpt:
        ckpt.restore(state)
        ckpt.save(0, state).committed.result(timeout=60)
        state["model"].base["layer2"].weight.data.zero_()
        assert ckpt.restore(state) == 1
        for step in (1, 2):
            ckpt.save(step, state).committed.result(timeout=60)
    assert [known for known, _ in offered] == [0, 0, 7]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    state = job(seed=2)
    with checkpointer(run) as ckpt:
        assert ckpt.restore(state) == 3
    assert weights(state) == expected


def test_a_pattern_that_matches_nothing_is_said_with_the_names_that_there_are(run, caplog):
    state = job()
    with checkpointer(run, frozen=["model/base.*", "model/basis.*"]) as ckpt, caplog.at_level("WARNING", "holdfast"):
        ckpt.restore(state)
        for step in range(2):
            ckpt.save(step, state).committed.result(timeout=60)
    [said] = [record.getMessage() for record in caplog.records if "matches no tensor" in record.getMessage()]
    assert "'model/basis.*'" in said
    assert "'model/" in said


@pytest.mark.parametrize("pattern", ["model/*", "model/adapter.bias", "optimizer/*"])
def test_a_pattern_that_names_what_the_optimizer_trains_is_refused(run, pattern):
    state = job()
    state["model"].adapter(torch.ones(40)).sum().backward()
    state["optimizer"].step()
    with checkpointer(run, frozen=[pattern]) as ckpt:
        ckpt.restore(state)
        with pytest.raises(errors.StateError, match=r"model/adapter.*' is declared frozen, and 'optimizer' trains it"):
            ckpt.save(0, state)


def test_one_text_instead_of_a_list_of_patterns_is_refused(run):
    with pytest.raises(errors.StateError, match=r"frozen=\['model/\*'\]"):
        checkpointer(run, frozen="model/*")


def test_a_component_that_is_each_ranks_own_is_declared_by_its_name_without_the_rank(run, offered):
    state = {"table": {"rows": torch.arange(2000.0)}, "more": {"x": torch.zeros(3)}}
    with checkpointer(run, frozen=["table/*"]) as ckpt:
        ckpt.restore(state)
        for step in range(2):
            ckpt.save(step, state).committed.result(timeout=60)
    assert offered[1][0] == 2


def train_sharded(rank, run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 3))
    model[:2].requires_grad_(False)
    model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    compared = []

    def counted(*pair):
        compared.append(pair)
        return same_bits(*pair)

    with checkpointer(run, frozen=["model/0.*", "model/1.*"]) as ckpt, pytest.MonkeyPatch.context() as patched:
        patched.setattr(frozen, "same_bits", counted)
        ckpt.restore(state)
        for step in range(3):
            model(torch.ones(5, 40)).sum().backward()
            state["optimizer"].step()
            ckpt.save(step, state).committed.result(timeout=60)
        return len(compared), len(ckpt.parts.saver._staging._distrusted)


def test_a_sharded_base_that_is_gathered_at_each_step_has_not_changed(run):
    assert run_ranks(train_sharded, 2, run) == [(2, 0)] * 2, "each save compares the one whose turn it is, and no other"


def save_on_ranks(rank, run):
    state = job()
    with checkpointer(run) as ckpt:
        ckpt.restore(state)
        known = []
        for step in range(3):
            handle = ckpt.save(step, state)
            known.append(len(ckpt.parts.saver._staging._places[0].layout.frozen.digests))
            handle.committed.result(timeout=60)
            state["model"].step()
    state["model"].step()
    fresh = job(seed=4)
    with checkpointer(run) as ckpt:
        start = ckpt.restore(fresh)
    base = {name: tensor for name, tensor in weights(state).items() if name.startswith("base.")}
    restored = {name: tensor for name, tensor in weights(fresh).items() if name.startswith("base.")}
    return start, restored == base, known[2]


def test_two_ranks_each_keep_their_share_of_what_is_declared_frozen(run):
    (first, second) = run_ranks(save_on_ranks, 2, run)
    assert first[:2] == second[:2] == (3, True)
    assert first[2] + second[2] >= 7
