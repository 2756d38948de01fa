"""Pulls one checkpoint into a folder: resolve -> read documents -> fetch and verify -> write -> publish.

Memory: the largest unit, once; for DCP all units, because its save writes them in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from holdfast.export.contents import Contents, Unit, read_contents
from holdfast.export.dcp_folder import write_dcp_folder
from holdfast.export.json_files import write_summary, write_trees
from holdfast.export.publish import check_room, check_target, published
from holdfast.export.safetensors_files import check_safetensors, write_safetensors_file
from holdfast.export.state_dicts import state_dict_of
from holdfast.export.tensors import bytes_to_read, read_tensors
from holdfast.export.torch_files import write_torch_file
from holdfast.progress import readable_bytes
from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast.state.components import Kind
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import ConfigurationError, HoldfastError, IntegrityError, NoRestorePoint
from holdfast_protocol.base import RunName
from holdfast_protocol.restores import RestoreDecision, RestorePoint
from holdfast_protocol.runs import Point
from holdfast_protocol.states import StoreRole

_REASONS_SHOWN = 3

OnTotal = Callable[[int], None]
OnBytes = Callable[[int], None]
OnNote = Callable[[str], object]


class Format(StrEnum):
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    DCP = "dcp"


def pull(
    client: Client,
    run: RunName,
    point: Point,
    target: Path,
    format_: Format,
    *,
    only: Collection[str] = (),
    force: bool = False,
    on_total: OnTotal = lambda count: None,
    on_bytes: OnBytes = lambda count: None,
    on_note: OnNote = lambda note: None,
) -> dict[str, Any]:
    """Writes the checkpoint to the folder `target` and returns the content of its `checkpoint.json`.

    `only`: just these components. `on_total` gets the number of bytes to fetch, once; `on_bytes` each part of them;
    `on_note` a sentence if a store did not answer, and the point before if this one is damaged.
    Raises NoRestorePoint, ConfigurationError (`target`, `only`, or a dtype that the format lacks), DiskFull, and
    IntegrityError for chunks or documents that do not match their digests.
    """
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
    force: bool,
    on_total: OnTotal,
    on_bytes: OnBytes,
    on_note: OnNote,
) -> dict[str, Any]:
    with TransferWorkers() as workers, CheckpointSource(client, run, chosen, workers=workers) as source:
        contents = read_contents(source)
        units = _chosen_units(contents, only)
        if format_ is Format.SAFETENSORS:
            check_safetensors(contents.layout, units)
        check_room(target, sum(_bytes_of(contents, unit) for unit in units))
        on_total(sum(bytes_to_read(contents, unit.tensors) for unit in units))
        with published(target, force=force) as folder:
            files = _write(source, contents, units, folder, format_=format_, on_bytes=on_bytes)
            files += write_trees(folder, contents, units)
            for role, count in source.bytes_from.items():
                if role is not StoreRole.PRIMARY:
                    on_note(f"{readable_bytes(count)} were read from the {role} store.")
            return write_summary(folder, contents, format_, files)


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
