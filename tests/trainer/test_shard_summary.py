"""The trainer's own save says all of a ShardSummary, on its way to the store and on its way through the spool."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast_protocol.checkpoints import Component, MetricValue, ShardContent, ShardSummary

MEASURED = ShardSummary.model_fields.keys() - ShardContent.model_fields.keys()


@pytest.mark.parametrize("local", [False, True], ids=["at once", "through the spool"])
def test_a_save_says_and_measures_everything(run, service, tmp_path, local):
    state = {"model": torch.nn.Linear(4, 4), "notes": {"n": 1}}
    with holdfast.Checkpointer(run, local=tmp_path / "nvme" if local else None) as ckpt:
        ckpt.restore(state)
        handle = ckpt.save(0, state, metrics={"loss": 0.5})
        view = handle.committed.result(timeout=60)
        assert handle.local.result(timeout=60) is local
    (shard,) = service.client.checkpoints.manifest(view.id).shards
    assert shard.components == {
        "model": Component(kind="model", logical_bytes=80),
        "notes": Component(kind="extra", logical_bytes=0),
    }
    assert (shard.logical_bytes, shard.finite, shard.metrics) == (80, True, {"loss": MetricValue.of(0.5)})
    assert MEASURED, "what is measured stands in ShardSummary itself"
    assert not [name for name in MEASURED if not 0 < getattr(shard, name) < 60]
    assert view.blocked_seconds == shard.blocked_seconds
