"""The part of a checkpoint that is not tensors, as JSON: `checkpoint.json`, `<unit>.tree.json` and `rng.json`.

Trees stay in the typed form (holdfast/state/tree.py describes it), which keeps every type exactly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.export.contents import Contents, Unit


def write_json(folder: Path, name: str, value: Any) -> str:
    with (folder / name).open("x", encoding="utf-8") as file:
        json.dump(value, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    return name


def write_trees(folder: Path, contents: Contents, units: list[Unit]) -> list[str]:
    """The files' names."""
    written = [
        write_json(folder, f"{unit.name}.tree.json", {"kind": unit.kind, "tree": unit.tree})
        for unit in units
        if unit.kind is not None and unit.tree is not None
    ]
    if contents.rng:
        written.append(write_json(folder, "rng.json", {str(rank): tree for rank, tree in contents.rng.items()}))
    return written


def write_summary(
    folder: Path, contents: Contents, format_name: str, files: list[str], ties: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Step, digest, metrics, components and the rest of the catalog's view, and the list of files. `ties`: by the names
    in the files, if these are not the checkpoint's."""
    tensors = contents.layout.tensors.items()
    stored = {name: entry.alias_of for name, entry in tensors if entry.alias_of is not None}
    summary = {
        "format": format_name,
        "files": sorted(files),
        "tied": stored if ties is None else ties,
        **contents.view.model_dump(mode="json", exclude={"etag"}),
    }
    write_json(folder, "checkpoint.json", summary)
    return summary
