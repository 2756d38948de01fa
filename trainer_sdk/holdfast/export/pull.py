"""Pulls one checkpoint into a folder: resolve -> read documents -> fetch and verify -> write -> publish.

Memory: the largest unit, once; for DCP all units, because its save writes them in one go. For Hugging Face some chunks,
whatever the size of the model: hf/weight_files.py writes each where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import StrEnum
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from holdfast.export.contents import Contents, Unit, read_contents
from holdfast.export.dcp_folder import write_dcp_folder
from holdfast.export.hf.folder import HfChoices, plan_folder, write_folder
from holdfast.export.hf.model_files import CONFIG, read_kept
from holdfast.export.json_files import write_summary, write_trees
from holdfast.export.publish import check_room, check_target, clear_leftovers, place_of, published
from holdfast.export.safetensors_files import check_safetensors, write_safetensors_file
from holdfast.export.state_dicts import state_dict_of
from holdfast.export.tensors import bytes_to_read, read_tensors
from holdfast.export.torch_files import write_torch_file
from holdfast.progress import readable_bytes
from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast.state.components import HF_FILES, Kind
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import (
    CheckpointCold,
    ConfigurationError,
    HoldfastError,
    IntegrityError,
    NoRestorePoint,
    NotFound,
)
from holdfast_protocol.base import RunName
from holdfast_protocol.restores import RestoreDecision, RestorePoint
from holdfast_protocol.runs import Point
from holdfast_protocol.states import CheckpointState, StoreRole

_REASONS_SHOWN = 3
_EARLIER_TRIED = 10
"""Each is some requests. A run's other checkpoints are seldom unlike these."""

OnTotal = Callable[[int], None]
OnBytes = Callable[[int], None]
OnNote = Callable[[str], object]


class Format(StrEnum):
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    DCP = "dcp"
    HF = "hf"


def pull(
    client: Client,
    run: RunName,
    point: Point,
    target: Path,
    format_: Format,
    *,
    only: Collection[str] = (),
    hf: HfChoices | None = None,
    force: bool = False,
    on_total: OnTotal = lambda count: None,
    on_bytes: OnBytes = lambda count: None,
    on_note: OnNote = lambda note: None,
) -> dict[str, Any]:
    """Writes the checkpoint to the folder `target` and returns the content of its `checkpoint.json`.

    `only`: just these components. `hf`: for Format.HF alone. `on_total` gets the number of bytes to fetch, once;
    `on_bytes` each part of them; `on_note` a sentence if a store did not answer, what was done to a model for Hugging
    Face, and the point before if this one is damaged.
    Raises NoRestorePoint, ConfigurationError (`target`, `only`, `hf`, or a dtype that the format lacks), DiskFull, and
    IntegrityError for chunks or documents that do not match their digests.
    """
    if hf is not None and format_ is not Format.HF:
        raise ConfigurationError(
            "--config, --dtype, --max-file-size, --prefix and --no-check are for --format hf. Leave them out."
        )
    target = place_of(target)
    clear_leftovers(target)
    check_target(target, force=force)
    decision = client.restores.restore_point(run.project, run.run, str(point))
    if decision.note:
        on_note(decision.note)
    chosen = decision.restore_point
    if chosen is None:
        raise NoRestorePoint(_why_nothing(run, point, decision))
    try:
        return _pull(
            client,
            run,
            chosen,
            target,
            format_,
            only=only,
            hf=hf or HfChoices(),
            force=force,
            on_total=on_total,
            on_bytes=on_bytes,
            on_note=on_note,
        )
    except IntegrityError:
        _offer_the_one_before(client, run, chosen, on_note)
        raise


def _offer_the_one_before(client: Client, run: RunName, chosen: RestorePoint, on_note: OnNote) -> None:
    with suppress(HoldfastError):  # the chosen one's error is raised even if this fails
        before = client.restores.restore_point(run.project, run.run, before_step=chosen.step).restore_point
        if before is not None:
            on_note(f"step {chosen.step} cannot be pulled whole. The point before it is {run}@{before.step}.")


def _pull(
    client: Client,
    run: RunName,
    chosen: RestorePoint,
    target: Path,
    format_: Format,
    *,
    only: Collection[str],
    hf: HfChoices,
    force: bool,
    on_total: OnTotal,
    on_bytes: OnBytes,
    on_note: OnNote,
) -> dict[str, Any]:
    with TransferWorkers() as workers, CheckpointSource(client, run, chosen, workers=workers) as source:
        contents = read_contents(source)
        if format_ is Format.HF:
            earlier = partial(files_of_an_earlier, client, run, chosen, workers)
            plan = plan_folder(source, contents, only=only, choices=hf, earlier=earlier)
            for note in plan.notes:
                on_note(note)
            check_room(target, plan.bytes)
            on_total(plan.bytes_to_fetch(contents))
            with published(target, force=force) as folder:
                files = write_folder(source, contents, plan, folder, on_bytes)
                _tell_stores(source, on_note)
                return write_summary(folder, contents, format_, files, plan.ties)
        units = _chosen_units(contents, only)
        if format_ is Format.SAFETENSORS:
            check_safetensors(contents.layout, units)
        check_room(target, sum(_bytes_of(contents, unit) for unit in units))
        on_total(sum(bytes_to_read(contents, unit.tensors) for unit in units))
        with published(target, force=force) as folder:
            files = _write(source, contents, units, folder, format_=format_, on_bytes=on_bytes)
            files += write_trees(folder, contents, units)
            _tell_stores(source, on_note)
            return write_summary(folder, contents, format_, files)


def _tell_stores(source: CheckpointSource, on_note: OnNote) -> None:
    for role, count in source.bytes_from.items():
        if role is not StoreRole.PRIMARY:
            on_note(f"{readable_bytes(count)} were read from the {role} store.")


def files_of_an_earlier(
    client: Client, run: RunName, chosen: RestorePoint, workers: TransferWorkers
) -> tuple[int, Mapping[str, bytes]] | None:
    """The step of the newest checkpoint before `chosen` that has a config in the component `hf_files`, as an import of
    a folder of Hugging Face has it, and the files in it. None if none of the last few with it can be read now."""
    views = client.checkpoints.all(run.project, run.run, state=CheckpointState.COMMITTED, max_step=chosen.step)
    with_files = [view for view in views if view.step < chosen.step and HF_FILES in view.components]
    for view in sorted(with_files, key=attrgetter("step"), reverse=True)[:_EARLIER_TRIED]:
        with suppress(NotFound, IntegrityError, CheckpointCold):
            point = client.restores.restore_point(run.project, run.run, view.id).restore_point
            if point is None:
                continue
            with CheckpointSource(client, run, point, workers=workers) as source:
                kept = read_kept(source, read_contents(source))
            if CONFIG in kept:
                return view.step, kept
    return None


def _why_nothing(run: RunName, point: Point, decision: RestoreDecision) -> str:
    """Why the newest checkpoints cannot be pulled; or that there never was any."""
    if not decision.ever_committed:
        return f"{run} has nothing to pull: nothing was ever committed in it."
    reasons = " ".join(each.detail for each in decision.skipped[:_REASONS_SHOWN])
    return f"{run} has nothing to pull at {point}. {reasons}".rstrip()


def _chosen_units(contents: Contents, only: Collection[str]) -> list[Unit]:
    components = sorted({unit.name.partition("@")[0] for unit in contents.units})
    if unknown := sorted(set(only) - set(components)):
        raise ConfigurationError(
            f"The checkpoint has no component {unknown[0]!r}. Its components are {', '.join(components) or 'none'}."
        )
    return [unit for unit in contents.units if not only or unit.name.partition("@")[0] in only]


def _bytes_of(contents: Contents, unit: Unit) -> int:
    entries = (contents.layout.tensors[name] for name in unit.tensors)
    return sum(entry.total_bytes for entry in entries if entry.alias_of is None)


def _write(
    source: CheckpointSource,
    contents: Contents,
    units: list[Unit],
    folder: Path,
    *,
    format_: Format,
    on_bytes: OnBytes,
) -> list[str]:
    with_tensors = [unit for unit in units if unit.tensors]
    if format_ is Format.DCP:
        state = {
            unit.name: state_dict_of(
                unit, read_tensors(source, contents, unit.tensors, on_bytes), parameters_by_name=True
            )
            for unit in with_tensors
        }
        # The content of a dcp.save gets its own names back.
        own = state[units[0].name] if units and units[0].kind is Kind.DCP and with_tensors else state
        return write_dcp_folder(folder, own)
    files = []
    for unit in with_tensors:
        tensors = read_tensors(source, contents, unit.tensors, on_bytes)
        if format_ is Format.TORCH:
            files.append(write_torch_file(folder, unit, tensors))
        else:
            files.append(write_safetensors_file(folder, unit, tensors, contents.layout))
    return files
