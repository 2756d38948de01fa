"""Selectors for people: `demo/gpt`, `demo/gpt@latest`, `demo/gpt@1200`, `demo/gpt@1200#3`, `demo/gpt@best:loss:max`.

`@1200` means step 1200 on the line of descent; `#3` names the attempt (protocol rule 3). A checkpoint's id stands
for itself: `demo/gpt@ck_…`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_RUN = re.compile(rf"^(?P<project>{_NAME})/(?P<run>{_NAME})$")
_STEP = re.compile(r"^(?P<step>\d{1,18})(?:#(?P<attempt>\d{1,9}))?$")
_BEST = re.compile(r"^best:(?P<metric>[^:@#]{1,100})(?::(?P<mode>min|max))?$")
_ID = re.compile(r"^ck_[0-9a-f]{32}$")

EXPECTED = "write it as project/run, project/run@latest, project/run@1200, project/run@1200#3 or project/run@best:loss"


class SelectorError(ValueError):
    """The text is not a selector."""


@dataclass(frozen=True)
class RunName:
    project: str
    run: str

    def __str__(self) -> str:
        return f"{self.project}/{self.run}"


@dataclass(frozen=True)
class Latest:
    def __str__(self) -> str:
        return "latest"


@dataclass(frozen=True)
class AtStep:
    step: int
    attempt: int | None = None

    def __str__(self) -> str:
        return f"{self.step}" if self.attempt is None else f"{self.step}#{self.attempt}"


@dataclass(frozen=True)
class Best:
    metric: str
    mode: Literal["min", "max"] = "min"

    def __str__(self) -> str:
        return f"best:{self.metric}:{self.mode}"


@dataclass(frozen=True)
class ById:
    checkpoint_id: str

    def __str__(self) -> str:
        return self.checkpoint_id


Point = Latest | AtStep | Best | ById


def parse_run(text: str) -> RunName:
    """`demo/gpt` -> RunName. Raises SelectorError."""
    match = _RUN.match(text)
    if match is None:
        raise SelectorError(f"{text!r} is not the name of a run; write it as project/run, for example demo/gpt")
    return RunName(match["project"], match["run"])


def parse_point(text: str) -> Point:
    """What stands behind the `@`. Raises SelectorError."""
    if text in ("", "latest"):
        return Latest()
    if match := _STEP.match(text):
        return AtStep(int(match["step"]), int(match["attempt"]) if match["attempt"] else None)
    if match := _BEST.match(text):
        return Best(match["metric"], "max" if match["mode"] == "max" else "min")
    if _ID.match(text):
        return ById(text)
    raise SelectorError(f"{text!r} does not name a checkpoint; {EXPECTED}")


def parse_selector(text: str) -> tuple[RunName, Point]:
    """`demo/gpt@1200` -> (RunName, Point); without an `@` it is the latest. Raises SelectorError."""
    run, _, point = text.partition("@")
    return parse_run(run), parse_point(point)
