"""A remedy that names a command names one that exists: `holdfast …` in messages and on the pages, word by word."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import typer

from holdfast_client.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
_COMMAND = re.compile(r"`holdfast((?: [^`\n]+)?)`")
_WORD = re.compile(r"^(?:-{1,2})?[a-z][a-z-]*$")


def places() -> list[Path]:
    sources = [path for package in ("service", "client", "trainer_sdk") for path in (ROOT / package).rglob("*.py")]
    return [*sources, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]


@functools.cache
def command_tree() -> Any:
    """Made once: the tree of all commands takes a good part of a second."""
    return typer.main.get_group(app)


def unknown_word(words: list[str]) -> str | None:
    """The first word that is neither a command nor an option where it stands; arguments end the command's name."""
    with_options = command_tree()
    for word in words:
        if word == "--":
            return None  # from here on another program's command
        if word.startswith("-"):
            if not any(word in parameter.opts for parameter in with_options.params) and word != "--help":
                return word
        elif _WORD.match(word) and hasattr(with_options, "get_command"):
            found = with_options.get_command(None, word)
            if found is None:
                return word
            with_options = found
    return None


def test_every_command_that_a_message_names_exists() -> None:
    wrong = []
    for place in places():
        for command in _COMMAND.findall(place.read_text(encoding="utf-8")):
            # "token create | list | revoke" and "[PROJECT]" in help texts are several commands or places, not words.
            words = command.split("|")[0].split()
            if (word := unknown_word(words)) is not None:
                wrong.append(f"{place.relative_to(ROOT)}: `holdfast{command}` has no {word}")
    assert not wrong
