"""A checkpoint of dcp.save as one of Holdfast's own that holds one model: for load_weights. Pure.

dcp.save keeps no components, only names that are joined by dots: `model.layers.0.weight`. The model to load tells which
of them are its own.
"""

from __future__ import annotations

import dataclasses

import torch

from holdfast.errors import ConfigurationError
from holdfast.state.components import Kind, module_tensors, unwrap
from holdfast.state.load import StoredState
from holdfast_protocol.index_documents import Layout, ShardLayout


def of_dcp(stored: StoredState, model: torch.nn.Module, component: str | None, selector: str) -> StoredState:
    """The tensors below `component`, or below the one key that has the model's parameters, as that model's.

    Raises ConfigurationError if no key or several have them.
    """
    wanted = [named.fqn for named in module_tensors("model", unwrap(model))]
    tensors = stored.layout.tensors
    keys = sorted({fqn.partition(".")[0] for fqn in tensors}) if component is None else [component]
    prefixes = ["", *(f"{key}." for key in keys)] if component is None else [f"{component}."]
    found = {prefix: sum(f"{prefix}{fqn}" in tensors for fqn in wanted) for prefix in prefixes}
    most = max(found.values(), default=0)
    best = [prefix for prefix, count in found.items() if count == most]
    if not most:
        where = "" if component is None else f" below {component!r}"
        raise ConfigurationError(f"{selector} has none of this model's parameters{where}. Its keys are {_some(keys)}.")
    if len(best) > 1:
        raise ConfigurationError(
            f"{selector} has this model's parameters below {_some(best)}. Name one with component=…."
        )
    return _below(stored, best[0], component or best[0].removesuffix(".") or "model")


def _below(stored: StoredState, prefix: str, key: str) -> StoredState:
    names = {fqn: f"{key}/{fqn[len(prefix) :]}" for fqn in stored.layout.tensors if fqn.startswith(prefix)}
    layout = Layout(
        stored.layout.world_size,
        {name: stored.layout.tensors[fqn]._replace(component=key) for fqn, name in names.items()},
        tuple(
            ShardLayout(
                shard.chunks, tuple(p._replace(tensor=names[p.tensor]) for p in shard.pieces if p.tensor in names)
            )
            for shard in stored.layout.shards
        ),
    )
    return dataclasses.replace(stored, layout=layout, replicated_trees={key: [Kind.MODULE.value, None]}, rank_trees={})


def _some(names: list[str]) -> str:
    return ", ".join(name or "the top" for name in names[:10]) + (" and more" if len(names) > 10 else "")
