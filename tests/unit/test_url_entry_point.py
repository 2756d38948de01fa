"""fsspec finds `holdfast://` by the entry point of pyproject.toml, and nothing else of the client needs fsspec."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

from fsspec.spec import AbstractFileSystem

ROOT = Path(__file__).resolve().parents[2]


def test_the_entry_point_leads_to_the_filesystem() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["fsspec.specs"]["holdfast"].partition(":")
    filesystem = getattr(importlib.import_module(module), name)
    assert issubclass(filesystem, AbstractFileSystem)
    assert filesystem.protocol == "holdfast"
    assert [each.partition(">")[0] for each in project["optional-dependencies"]["url"]] == ["fsspec"]


def test_without_fsspec_all_else_of_the_client_works() -> None:
    code = (
        "import sys; sys.modules['fsspec'] = None\n"
        "import holdfast_client.cli.main, holdfast_client.filesystem.checkpoint_files\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
