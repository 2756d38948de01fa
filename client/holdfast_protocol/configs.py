"""A job's configuration: what it was told to train, as its attempt gave it. For people, who compare attempts by it.

`GET /v1/projects/{project}/runs/{run}/attempts/{number}/config`   -> ConfigView
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue

from holdfast_protocol.base import Reply, fits
from holdfast_protocol.text import is_text

MOST_CONFIG_BYTES = 64 * 1024
"""As JSON."""
DEEPEST_CONFIG = 32
MOST_DIFFERENCES = 1000


def _is_plain(config: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Raises ValueError for what the catalog cannot keep."""
    for path, value, depth in _walk(config):
        if depth > DEEPEST_CONFIG:
            raise ValueError(f"{path} lies more than {DEEPEST_CONFIG} levels deep; flatten it")
        if not all(is_text(each, one_line=False) for each in (path, value) if isinstance(each, str)):
            raise ValueError("it holds text with characters that no database keeps; leave them out")
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{path} is {value}, which JSON has no number for; give it as a text")
    return config


Config = Annotated[dict[str, JsonValue], fits(MOST_CONFIG_BYTES), AfterValidator(_is_plain)]


class ConfigDifference(Reply):
    path: str = Field(description="Where it lies, such as `optimizer.betas[0]`.")
    before: JsonValue = Field(default=None, description="Null, too, where there was nothing.")
    after: JsonValue = None
    change: str = Field(description="`added`, `removed` or `changed`.")


class ConfigView(Reply):
    attempt: int
    config: dict[str, JsonValue] | None = Field(description="Null: the job gave none.")
    compared_with: int | None = Field(
        description="The attempt that it is compared with: the one that was asked for, else the newest one before that "
        "gave a configuration; null: there is none."
    )
    differences: list[ConfigDifference] = Field(description="Each value that is another one, by its path.")
    differences_left_out: int = Field(default=0, description=f"Beyond the first {MOST_DIFFERENCES}.")


def differences(before: dict[str, JsonValue], after: dict[str, JsonValue]) -> list[ConfigDifference]:
    """Value by value, ordered by path. A list is compared item by item. An empty map or list is a value too."""
    then, now = dict(_leaves(before)), dict(_leaves(after))
    found = []
    for path in sorted(then.keys() | now.keys()):
        if path not in then:
            found.append(ConfigDifference(path=path, after=now[path], change="added"))
        elif path not in now:
            found.append(ConfigDifference(path=path, before=then[path], change="removed"))
        elif not _same(then[path], now[path]):
            found.append(ConfigDifference(path=path, before=then[path], after=now[path], change="changed"))
    return found


def _same(before: JsonValue, after: JsonValue) -> bool:
    """True is not 1, but 1 is 1.0: YAML and JSON write numbers either way."""
    return before == after and isinstance(before, bool) == isinstance(after, bool)


def _leaves(config: JsonValue) -> Iterator[tuple[str, JsonValue]]:
    return ((path, value) for path, value, _ in _walk(config) if not (isinstance(value, dict | list) and value))


def _walk(value: JsonValue, path: str = "", depth: int = 0) -> Iterator[tuple[str, JsonValue, int]]:
    """Every value below, with its path and its depth. It never goes deeper than a request may."""
    if path:
        yield path, value, depth
    if depth > DEEPEST_CONFIG:
        return
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _walk(each, f"{path}.{key}" if path else key or '""', depth + 1)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _walk(each, f"{path}[{number}]", depth + 1)
