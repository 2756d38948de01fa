"""What a path of the filesystem names: a project, a run, a checkpoint by any selector, or a file of a checkpoint. Pure.

""  demo  demo/gpt  demo/gpt@1200#3  demo/gpt@best:eval/loss/model.safetensors
"""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast_protocol.base import RunName
from holdfast_protocol.runs import Point, SelectorError, parse_point, parse_run

FACTS = "checkpoint.json"
SUFFIX = ".safetensors"

_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Place(NamedTuple):
    """`project` None: all projects. `run` None: a project. `point` None: a run. `file` None: a checkpoint."""

    project: str | None = None
    run: RunName | None = None
    point: Point | None = None
    file: str | None = None


def parse_place(path: str) -> Place:
    """`path` without `holdfast://`. The name of a metric may have a `/`: the last part is a file if it is named as one.
    Raises SelectorError."""
    path = path.strip("/")
    of_run, at, rest = path.partition("@")
    if not at:
        return _without_point(path)
    run = parse_run(of_run)
    point, slash, name = rest.rpartition("/")
    if slash and (name == FACTS or name.endswith(SUFFIX)):
        return Place(run.project, run, _point(point), name)
    return Place(run.project, run, _point(rest))


def _point(text: str) -> Point:
    if not text:
        raise SelectorError("nothing follows the @; write for example @latest, @1200 or @best:loss")
    return parse_point(text)


def _without_point(path: str) -> Place:
    if not path:
        return Place()
    if path.count("/") > 1:
        first = "/".join(path.split("/")[:2])
        raise SelectorError(f"{path!r} does not say which checkpoint; write for example {first}@latest/model{SUFFIX}")
    if "/" in path:
        run = parse_run(path)
        return Place(run.project, run)
    if _PROJECT.fullmatch(path) is None:
        raise SelectorError(f"{path!r} is not the name of a project")
    return Place(path)
