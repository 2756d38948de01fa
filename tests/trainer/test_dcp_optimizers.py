"""What a pull gives back of an optimizer that people's own dcp.save has saved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import holdfast
from holdfast.export.pull import Format, pull
from holdfast_protocol.base import RunName
from holdfast_protocol.runs import Latest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.rule("writer-is-whole")
@pytest.mark.parametrize("steps", [1, 0])
def test_an_optimizer_loads_what_pull_gives_back_of_a_dcp_save(run, service, tmp_path, steps):
    """DCP keeps every key as text, and nothing of an empty dict."""
    model, optimizer = trained_once(steps)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "ids": {"7": torch.ones(1)}}
    with holdfast.Checkpointer(run) as ckpt:
        dcp.save(state, storage_writer=ckpt.writer(0))
    pull(service.client, RunName(*run.split("/")), Latest(), tmp_path / "out", Format.TORCH)
    found = torch.load(tmp_path / "out" / "dcp.pt", weights_only=True)
    assert list(found["ids"]) == ["7"], "other keys are as DCP has them"
    _, fresh = trained_once(steps)
    fresh.load_state_dict(found["optim"])
    slots, expected = fresh.state_dict()["state"], optimizer.state_dict()["state"]
    assert len(slots) == 2 * steps
    assert slots.keys() == expected.keys()
    for number, each in expected.items():
        assert each.keys() == slots[number].keys()
        assert all(torch.equal(value, slots[number][name]) for name, value in each.items())


def trained_once(steps):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return model, optimizer
