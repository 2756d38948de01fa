"""Parts of a checkpoint into live objects, and another run's weights into a model.

For `load_weights`, and for the evaluation jobs of integrations/. It reads like a restore (documents -> plan -> fetch
and verify -> apply), with other demands on the fit. It opens and fences no attempt, and touches no optimizer and no
RNG.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from holdfast.dcp.metadata import is_dcp
from holdfast.dcp.weights import of_dcp
from holdfast.distributed.ranks import Ranks
from holdfast.errors import ConfigurationError, NoRestorePoint
from holdfast.layout.reshard import ReadPlan, plan_reads
from holdfast.progress import speak_up
from holdfast.restore.checkpoint_reader import CheckpointSource, HostSharing, read_documents
from holdfast.settings import TrainerSettings
from holdfast.state.components import Kind
from holdfast.state.destinations import Arrivals
from holdfast.state.load import LoadOptions, LoadPlan, LoadReport, StoredState, plan_load
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_protocol.base import RunName
from holdfast_protocol.restores import RestorePoint
from holdfast_protocol.runs import SelectorError, parse_selector

log = logging.getLogger("holdfast")

Demand = Callable[[StoredState], tuple[dict[str, Any], LoadOptions]]
"""The stored state -> the state to load into, and how strictly it must fit. Called on every rank."""


def read_into(
    selector: str,
    demand: Demand,
    *,
    rank_trees: bool,
    view: Callable[[StoredState], StoredState] = lambda stored: stored,
    convert: Callable[[], object] | None = None,
    client_settings: ClientSettings | None = None,
) -> LoadReport:
    """Reads `demo/base@best:loss` (or `@latest`, `@1200`, …). `rank_trees`: also each rank's own values. `view`: the
    checkpoint under the state's names, if it was saved under others. `convert`: gives the objects of the state other
    dtypes, just before they take the values.

    Collective if torch.distributed is initialised. Nothing is changed before every byte was verified on all ranks.
    Raises NoRestorePoint, IntegrityError, StateMismatchError, or the service's error.
    """
    speak_up()
    try:
        run, point_of_run = parse_selector(selector)
    except SelectorError as error:
        raise ConfigurationError(f"{error}.") from None
    settings = TrainerSettings()
    ranks = Ranks(timeout_seconds=settings.collective_timeout_seconds, swarms=settings.swarm)
    try:
        with Client(client_settings) as client, TransferWorkers(settings.transfers) as workers:
            point = ranks.from_first(lambda: resolve(client, run, str(point_of_run)))
            with CheckpointSource(client, run, point, workers=workers) as source:
                documents = read_documents(ranks, source, rank_trees=rank_trees)
                documents = replace(documents, stored=view(documents.stored))
                state, options = demand(documents.stored)
                planned: list[tuple[LoadPlan, ReadPlan, Arrivals]] = []

                def planned_load() -> LoadPlan:
                    return plan_load(
                        state, documents.stored, rank=ranks.rank, world_size=ranks.world_size, options=options
                    )

                def plan_load_here() -> None:
                    plan = planned_load()
                    reads = plan_reads(documents.layout, plan.wanted, prefer_rank=ranks.rank)
                    # Not into the live tensors: a refused load must leave the state as it was.
                    planned.append((plan, reads, plan.arrivals(into_live=False)))

                ranks.together(plan_load_here)
                [(plan, reads, arrivals)] = planned
                with HostSharing(ranks, settings, client).of(reads, documents.chunks) as shared:
                    ranks.together(
                        lambda: source.read(reads, documents.layout, documents.chunks, arrivals.rooms(), shared=shared)
                    )

            def apply() -> None:
                if convert is None:
                    plan.apply(arrivals)
                else:
                    convert()
                    planned_load().apply(arrivals)  # planned again: `convert` may have replaced tensors

            ranks.together(apply)
            if ranks.is_first:
                log.info("loaded %s of %s, step %d%s", ", ".join(state), run, point.step, _left_out(plan.report))
            return plan.report
    finally:
        ranks.close()


def resolve(client: Client, run: RunName, selector: str) -> RestorePoint:
    """Logs what it passes over. Raises NoRestorePoint."""
    decision = client.restores.restore_point(run.project, run.run, selector)
    for note in decision.notes(f"{run}@{selector}"):
        log.warning("%s", note)
    if (point := decision.restore_point) is None:
        raise NoRestorePoint(
            f"{run} has nothing to load at {selector!r}. `holdfast checkpoints list {run}` lists what it has"
        )
    return point


def _left_out(report: LoadReport) -> str:
    parts = [
        f"{len(names)} {what}"
        for names, what in (
            (report.missing, "missing"),
            (report.unexpected, "unexpected"),
            (report.excluded, "excluded"),
        )
        if names
    ]
    return f" ({', '.join(parts)})" if parts else ""


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

    strict: the model must have exactly the stored parameters (except excluded ones); else the report lists the rest.
    exclude: shell patterns of parameter names that stay as they are, for example `head.*`.
    dtype: converts the model's floating-point tensors before loading. Values are always converted to the model's
    dtypes. component: the model to load if the checkpoint has several; its key in the state that was saved.
        A checkpoint of dcp.save through `ckpt.writer()` has only names: the key is then the prefix of this model's
        parameters, as in `dcp.save({"model": get_model_state_dict(model)}, …)`.

    Collective if torch.distributed is initialised. Nothing is changed before every byte was verified on all ranks.
    Raises NoRestorePoint, IntegrityError, StateMismatchError, or the service's error.
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
