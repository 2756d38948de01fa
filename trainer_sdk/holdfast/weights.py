"""Load another run's weights into a model: no attempt is opened, no optimizer and no RNG is touched.

The same reading as a restore (documents -> plan -> fetch and verify -> apply), with other demands on the fit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from holdfast.documents import read_documents
from holdfast.errors import ConfigurationError, NoRestorePoint
from holdfast.host_sharing import HostSharing
from holdfast.layout.reshard import ReadPlan, plan_reads
from holdfast.log import speak_up
from holdfast.ranks import Ranks
from holdfast.settings import TrainerSettings
from holdfast.source import CheckpointSource
from holdfast.state.arrivals import Arrivals
from holdfast.state.components import Kind
from holdfast.state.load import LoadOptions, LoadPlan, LoadReport, plan_load
from holdfast.state.stored import StoredState
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_protocol.restore import RestorePoint
from holdfast_protocol.selectors import RunName, SelectorError, parse_selector

log = logging.getLogger("holdfast")


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
    dtype: converts the model's floating-point tensors first. Values are always converted to the model's dtypes.
    component: which of several models of the checkpoint; its key in the state that was saved.

    Collective where torch.distributed is initialised. Nothing is changed before every byte was verified on all ranks.
    Raises NoRestorePoint, IntegrityError, StateMismatchError, or what the service says.
    """
    speak_up()
    try:
        run, point_of_run = parse_selector(selector)
    except SelectorError as error:
        raise ConfigurationError(f"{error}.") from None
    settings = TrainerSettings()
    ranks = Ranks(timeout_seconds=settings.collective_timeout_seconds)
    try:
        with Client(client_settings) as client, TransferWorkers(settings.transfers) as workers:
            point = ranks.from_first(lambda: _resolve(client, run, str(point_of_run)))
            with CheckpointSource(client, point.checkpoint_id, workers=workers) as source:
                documents = read_documents(ranks, source, rank_trees=False)
                key = _model_component(documents.stored, component, selector)
                options = LoadOptions(strict=strict, cast=True, exclude=tuple(f"{key}/{each}" for each in exclude))
                if dtype is not None:
                    model.to(dtype)
                planned: list[tuple[LoadPlan, ReadPlan, Arrivals]] = []

                def plan_load_here() -> None:
                    plan = plan_load(
                        {key: model}, documents.stored, rank=ranks.rank, world_size=ranks.world_size, options=options
                    )
                    reads = plan_reads(documents.layout, plan.wanted, prefer_rank=ranks.rank)
                    # Not into the live tensors: whoever is refused keeps the model as it was.
                    planned.append((plan, reads, plan.arrivals(into_live=False)))

                ranks.together(plan_load_here)
                [(plan, reads, arrivals)] = planned
                with HostSharing(ranks, settings).of(reads, documents.chunks) as shared:
                    ranks.together(
                        lambda: source.read(reads, documents.layout, documents.chunks, arrivals.rooms(), shared=shared)
                    )
            ranks.together(lambda: plan.apply(arrivals))
            if ranks.is_first:
                log.info("loaded the weights of %s, step %d%s", run, point.step, _left_out(plan.report))
            return plan.report
    finally:
        ranks.close()


def _resolve(client: Client, run: RunName, selector: str) -> RestorePoint:
    point = client.restore_point(run.project, run.run, selector).restore_point
    if point is None:
        raise NoRestorePoint(
            f"{run} has nothing to load at {selector!r}. `holdfast checkpoints {run}` lists what it has"
        )
    return point


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
