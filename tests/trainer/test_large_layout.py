"""A model of ten billion elements, sharded over 16 ranks, on the meta device: planned at once, for planning is local.

What DCP's planner took 11 s for at 256 ranks x 1,000 items, every rank here does by itself; timings are no test's
business, but a plan that grew with the square of anything would not come to an end in this one's time limit.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.layout.plan import PieceSpec, build_local_plan, global_layout
from holdfast.state import tensors
from holdfast.state.capture import capture
from holdfast.state.components import Declarations

WORLD = 16
LAYERS, WIDTH = 500, 4472


@pytest.fixture
def fake_world():
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield init_device_mesh("cpu", (WORLD,))
    dist.destroy_process_group()


def specs_of(specs: list[PieceSpec], rank: int) -> list[PieceSpec]:
    """What `rank` would see, made from what rank 0 sees: the same rows further down, the same copies elsewhere."""
    seen = []
    for spec in specs:
        if spec.replicas:
            seen.append(spec._replace(replicas=((rank, WORLD),)))
            continue
        rows = spec.shape[0]
        first = min(rows * rank, spec.global_shape[0])
        left = max(0, min(rows, spec.global_shape[0] - first))
        seen.append(spec._replace(offsets=(first, *spec.offsets[1:]), shape=(left, *spec.shape[1:])))
    return seen


@pytest.mark.rule("layout-vote")
def test_a_thousand_tensors_of_ten_billion_elements_are_planned_by_each_rank_alone(fake_world, monkeypatch):
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer, mesh=fake_world)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    assert sum(parameter.numel() for parameter in model.parameters()) > 10e9
    assert len(list(model.parameters())) == 2 * LAYERS
    # The bytes are not there, and only staging needs them; without addresses every tensor would look tied to the first.
    monkeypatch.setattr(tensors, "refuse_unsupported", lambda name, tensor: None)
    monkeypatch.setattr(tensors.TieBook, "tied_to", lambda *_: None)

    state = {"model": model, "optimizer": optimizer}
    declared = Declarations.of(replicated=(), per_rank=(), frozen=())
    specs = capture(state, rank=0, world_size=WORLD, declared=declared).specs
    plans = [build_local_plan(specs_of(specs, rank), rank=rank, world_size=WORLD) for rank in range(WORLD)]
    layout = global_layout(plans)

    assert len(layout.tensors) == len(specs) == 4 * 2 * LAYERS
    stored = [sum(shard.chunks) for shard in layout.shards]
    whole = 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
    assert whole <= sum(stored) <= whole * 1.001, "every byte once"
    assert max(stored) <= 1.02 * whole / WORLD, "and no rank has more than its share"
    again = capture(state, rank=0, world_size=WORLD, declared=declared).specs
    assert build_local_plan(again, rank=0, world_size=WORLD, previous=plans[0]) is plans[0]
