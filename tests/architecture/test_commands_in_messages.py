"""A command that a message, a page or an example names exists, with its verb and its options: `holdfast …`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from holdfast_client.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
_QUOTED = re.compile(r"`holdfast((?:\s[^`]+)?)`")
_TYPED = re.compile(r"^(?:\$ |(?:\S.* )?srun .*?)(?<!`)holdfast ([^#\n]+)", re.MULTILINE)
_LISTED = re.compile(r"""\["?holdfast"?, ([^\]]+)\]""")
_LITERALS = re.compile(r'"\s*\n\s*f?"')
_BROKEN_LINE = re.compile(r"\n\s*(?:# )?")
_PLACEHOLDER = re.compile(r"…|[A-Z\[{].*")


def places() -> list[Path]:
    sources = [path for package in ("service", "client", "trainer_sdk") for path in (ROOT / package).rglob("*.py")]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    examples = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".md", ".py", ".sbatch", ".yaml")]
    deployed = [path for path in (ROOT / "deploy").rglob("*") if path.suffix == ".yml" or path.name == "Dockerfile"]
    others = [ROOT / "docker-compose.yml", ROOT / ".env.example", ROOT / "Makefile"]
    return [*sources, *pages, *examples, *deployed, *others]


def commands_of(place: Path) -> Iterator[str]:
    """Each without the word `holdfast`, on one line."""
    text = place.read_text(encoding="utf-8")
    if place.suffix == ".py":
        text = _LITERALS.sub("", text)
    yield from (_BROKEN_LINE.sub(" ", quoted) for quoted in _QUOTED.findall(text))
    yield from _TYPED.findall(text)
    yield from (" ".join(re.findall(r"[^\s,\"]+", listed)) for listed in _LISTED.findall(text))


@functools.cache
def command_tree() -> Any:
    """Made once: the tree of all commands takes a good part of a second."""
    return typer.main.get_group(app)


def unknown_word(words: list[str]) -> str | None:
    """The first word that is neither a verb nor an option where it stands. After the verb come arguments."""
    found = command_tree()
    for word in words:
        if word in ("--", "\\"):
            return None  # from here on another program's command, or the next line
        if word.startswith("-"):
            option = word.partition("=")[0]
            known = {name for one in found.params for name in (*one.opts, *one.secondary_opts)}
            if option not in {*known, "--help"}:
                return word
        elif hasattr(found, "get_command"):
            if _PLACEHOLDER.fullmatch(word):
                return None
            verb = found.get_command(None, word)
            if verb is None:
                return word
            found = verb
    return None


def test_every_command_that_is_named_exists() -> None:
    wrong = []
    for place in places():
        for command in commands_of(place):
            # "tokens create | list | revoke" are several commands.
            words = command.split("|")[0].split()
            if (word := unknown_word(words)) is not None:
                wrong.append(f"{place.relative_to(ROOT)}: `holdfast {' '.join(words)}` has no {word}")
    assert not wrong


@pytest.mark.parametrize(
    ("command", "unknown"),
    [
        ("runs list demo --limit 5 --json", None),
        ("drills start demo/gpt --no-wait", None),
        ("launch --grace=110 -- torchrun --standalone", None),
        ("COMMAND --help", None),
        ("catalog rebuild --from s3://bucket", None),
        ("run -- python train.py", "run"),
        ("runs demo/gpt", "demo/gpt"),
        ("runs list --wait", "--wait"),
    ],
)
def test_a_wrong_noun_verb_or_option_is_noticed(command: str, unknown: str | None) -> None:
    assert unknown_word(command.split()) == unknown
