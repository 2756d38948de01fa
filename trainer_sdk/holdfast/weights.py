"""Load another run's weights into a model: no attempt is opened, no optimizer and no RNG is touched.

The same reading as a restore (documents -> plan -> fetch and verify -> apply), with other demands on the fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from holdfast.dcp.metadata import is_dcp
from holdfast.dcp.weights import of_dcp
from holdfast.errors import ConfigurationError
from holdfast.reading import read_into
from holdfast.state.components import Kind
from holdfast.state.load import LoadOptions, LoadReport
from holdfast.state.stored import StoredState
from holdfast_client.settings import ClientSettings


def load_weights(
    selector: str,
    model: torch.nn.Module,
    *,
    strict: bool = True,
    exclude: Iterable[str] = (),
    dtype: torch.dtype | None = None,
    component: str | None = None,
    client_settings: ClientSettings | None = None,
) -> LoadReport:
    """Loads the model of `demo/base@best:loss` (or `@latest`, `@1200`, …) into `model`, whatever the world sizes.

    strict: every parameter must be there, and no other (but for excluded ones); else the report tells what was not.
    exclude: shell patterns of parameter names that stay as they are, for example `head.*`.
    dtype: converts the model's floating-point tensors before the values come. These are always converted to the
    model's dtypes.
    component: which of several models of the checkpoint; its key in the state that was saved.
    What was saved by dcp.save through `ckpt.writer()` has no models, only names: the key is the one below which this
    model's parameters are found, as in `dcp.save({"model": get_model_state_dict(model)}, …)`.

    Collective where torch.distributed is initialised. Nothing is changed before every byte was verified on all ranks.
    Raises NoRestorePoint, IntegrityError, StateMismatchError, or what the service says.
    """

    def demand(stored: StoredState) -> tuple[dict[str, Any], LoadOptions]:
        key = _model_component(stored, component, selector)
        return {key: model}, LoadOptions(strict=strict, cast=True, exclude=tuple(f"{key}/{each}" for each in exclude))

    def view(stored: StoredState) -> StoredState:
        return of_dcp(stored, model, component, selector) if is_dcp(stored.replicated_trees) else stored

    convert = None if dtype is None else partial(model.to, dtype)
    return read_into(selector, demand, rank_trees=False, view=view, convert=convert, client_settings=client_settings)


def _model_component(stored: StoredState, asked: str | None, selector: str) -> str:
    models = sorted(key for key, tree in stored.replicated_trees.items() if _kind_of(tree) == Kind.MODULE)
    if asked is not None and asked not in models:
        raise ConfigurationError(f"{selector} has no model {asked!r}. Its models are {', '.join(models) or 'none'}.")
    if asked is None and len(models) != 1:
        raise ConfigurationError(
            f"{selector} has {len(models)} models ({', '.join(models) or 'none'}). Name one with component=…."
        )
    return asked or models[0]


def _kind_of(tree: Any) -> Any:
    return tree[0] if isinstance(tree, list) and tree else None
