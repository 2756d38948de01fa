"""The files of deploy/terraform, read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hcl2

ROOT = Path(__file__).resolve().parents[2]
TERRAFORM = ROOT / "deploy/terraform"


@dataclass(frozen=True)
class Block:
    """A resource or data source, an output or a variable. Texts are without the quotes of HCL."""

    file: Path
    kind: str
    name: str
    body: dict[str, Any]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items() if not key.startswith("__")}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value[1:-1] if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"' else value


@cache
def _read(path: Path) -> dict[str, Any]:
    return _plain(hcl2.loads(path.read_text(encoding="utf-8")))


def files(cloud: str) -> list[Path]:
    """Of the module, without its example."""
    return sorted(each for each in (TERRAFORM / cloud).rglob("*.tf") if "example" not in each.parts)


def blocks(cloud: str, *kinds: str) -> Iterator[Block]:
    """Resources and data sources of these types; `variable` and `output` are kinds too."""
    for path in files(cloud):
        document = _read(path)
        for kind in kinds:
            for found in (*document.get("resource", ()), *document.get("data", ())):
                for name, body in found.get(kind, {}).items():
                    yield Block(path, kind, name, body)
            for found in document.get(kind, ()) if kind in {"variable", "output"} else ():
                for name, body in found.items():
                    yield Block(path, kind, name, body)


def asked_for(cloud: str) -> Iterator[tuple[str, Block]]:
    """Everything that the provider gives, after `resource` or `data`."""
    for path in files(cloud):
        for what in ("resource", "data"):
            for found in _read(path).get(what, ()):
                for kind, named in found.items():
                    for name, body in named.items():
                        yield what, Block(path, kind, name, body)


def types(cloud: str) -> set[str]:
    """Of all resources."""
    return {kind for path in files(cloud) for found in _read(path).get("resource", ()) for kind in found}


def one(cloud: str, kind: str, name: str | None = None) -> dict[str, Any]:
    """The body of the one resource of that type, or of that name."""
    (found,) = (each for each in blocks(cloud, kind) if name in {None, each.name})
    return found.body


def attributes(body: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value that is no block, with the names that lead to it."""
    if isinstance(body, dict):
        for name, value in body.items():
            yield from attributes(value, (*path, name))
    elif isinstance(body, list) and any(isinstance(each, dict) for each in body):
        for each in body:
            yield from attributes(each, path)
    else:
        yield path, body
