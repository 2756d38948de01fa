"""docs/threat-model.md and the tests agree: each line of its tables names a test that is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "threat-model.md"
_ROW = re.compile(r"^\| (?P<cannot>.+?) \| (?P<because>.+?) \| (?P<tests>.+) \|$")
_TEST = re.compile(r"\[(?P<shown>[^\]]+)\]\(\.\./tests/(?P<path>[^)]+\.py)\) `(?P<name>test_\w+)`")


def rows() -> list[re.Match[str]]:
    found = [match for line in PAGE.read_text(encoding="utf-8").splitlines() if (match := _ROW.match(line))]
    return [row for row in found if row["cannot"] not in ("cannot", "---")]


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_each_line_of_a_table_is_read() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    heads = [line for line in lines if line.startswith("| cannot |")]
    assert len(rows()) > 60
    assert len([line for line in lines if line.startswith("|")]) == len(rows()) + 2 * len(heads)


@pytest.mark.parametrize("row", rows(), ids=lambda row: re.sub(r"\W+", "-", row["cannot"]))
def test_what_an_actor_cannot_do_is_held_by_a_test_that_is_there(row: re.Match[str]) -> None:
    named = list(_TEST.finditer(row["tests"]))
    assert named, "it names no test"
    assert _TEST.sub("", row["tests"]).strip(", ") == "", "a test is named by its file and its function"
    for test in named:
        assert test["shown"] == test["path"]
        path = ROOT / "tests" / test["path"]
        assert path.is_file(), test["path"]
        assert test["name"] in functions_of(path), f"{test['path']} has no {test['name']}"
