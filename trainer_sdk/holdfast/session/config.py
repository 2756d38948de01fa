"""What a job was told to train: taken from what the script has, made plain, and sent when the attempt is opened.

Checkpointer(config=…) -> **read_config()**, before the service is asked anything -> session.open -> the attempt's row
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from pathlib import Path, PurePath

from pydantic import JsonValue, TypeAdapter, ValidationError

from holdfast_client.errors import ConfigurationError
from holdfast_protocol.attempts import DEEPEST_CONFIG, Config
from holdfast_protocol.text import printable, without_users

_LEFT_OUT = "(left out)"
# At the end of a key, as a word of its own: after `_`, `-`, `.`, or as wandbApiKey has it.
_WORD = r"(?:^|[_\-.]|(?-i:(?<=[a-z0-9])(?=[A-Z])))"
_KEEPS_SECRETS = (
    r"secrets?|passwords?|passwd|pwd|passphrases?|api[_-]?keys?|private[_-]?keys?|access[_-]?keys?|credentials?"
)
_SECRET = re.compile(rf"{_WORD}(?:tokens?|{_KEEPS_SECRETS})$", re.IGNORECASE)
_SECRETS = re.compile(rf"{_WORD}(?:{_KEEPS_SECRETS})$", re.IGNORECASE)
"""Whatever is below, it is left out. A map of tokens is a tokenizer's, and only texts are left out of it."""
_CHECKED = TypeAdapter(Config)
_PLAIN = (bool, int, float, str)


def read_config(given: object) -> dict[str, JsonValue]:
    """`given`: a map, a dataclass, an argparse.Namespace, an object with `to_dict` or `model_dump`, or the path of a
    JSON or YAML file. Text under a key that names a secret (`api_key`, `wandb_token`, …) is left out, and so is all
    that is below `credentials` and the like, and the user and password of a URL. What JSON has no word for is told by
    its text, or by its type where the text differs from launch to launch.

    Raises ConfigurationError, which says what to change."""
    tree = _from_file(Path(given)) if isinstance(given, str | PurePath) else given
    plain = _plain(tree, "config", 0)
    if not isinstance(plain, dict):
        raise ConfigurationError(
            f"config= is a {type(given).__name__}. Give a map, a dataclass, a Namespace, or the path of a JSON or YAML "
            "file."
        )
    try:
        return _CHECKED.validate_python(plain)
    except ValidationError as error:
        raise ConfigurationError(f"config= cannot be kept: {error.errors()[0]['msg']}") from None


def _from_file(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix in (".yaml", ".yml"):
            return _from_yaml(text, path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"config= names {path}, which cannot be read: {error}") from None
    raise ConfigurationError(f"config= names {path}. Give a file that ends in .json, .yaml or .yml, or a map.")


def _from_yaml(text: str, path: Path) -> object:
    try:
        import yaml  # of the script's own making: a trainer's image need not have it
    except ImportError:
        raise ConfigurationError(
            f"config= names {path}, and PyYAML is not installed. Install pyyaml, or give a JSON file."
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _plain(value: object, path: str, depth: int) -> JsonValue:
    if depth > DEEPEST_CONFIG:
        raise ConfigurationError(f"{path} lies more than {DEEPEST_CONFIG} levels deep. Flatten it.")
    value = _opened(value)
    if isinstance(value, Enum):
        return _plain(value.value, path, depth + 1)
    if value is None or isinstance(value, _PLAIN):
        return _scalar(value)
    if isinstance(value, Mapping):
        return {
            printable(str(key), one_line=True): _LEFT_OUT
            if _is_secret(str(key), each)
            else _plain(each, f"{path}.{key}", depth + 1)
            for key, each in value.items()
        }
    if isinstance(value, Set):
        return [_plain(each, path, depth + 1) for each in sorted(value, key=str)]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(each, f"{path}[{number}]", depth + 1) for number, each in enumerate(value)]
    if callable(getattr(value, "item", None)) and getattr(value, "size", None) == 1:  # a number of numpy
        return _plain(value.item(), path, depth + 1)  # type: ignore[attr-defined]
    told = without_users(str(value))
    return printable(told) if " at 0x" not in told else f"<{type(value).__module__}.{type(value).__qualname__}>"


def _scalar(value: bool | float | str | None) -> JsonValue:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return printable(without_users(value)) if isinstance(value, str) else value


def _is_secret(key: str, value: object) -> bool:
    if isinstance(value, str | bytes):
        return _SECRET.search(key) is not None
    return not (value is None or isinstance(value, bool | int | float)) and _SECRETS.search(key) is not None


def _opened(value: object) -> object:
    """The map in what is like one."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace):
        return vars(value)
    for method in ("model_dump", "to_dict"):
        if not isinstance(value, type) and callable(made := getattr(value, method, None)):
            return made()
    return value
