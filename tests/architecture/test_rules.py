"""docs/rules.md and the tests agree: each rule that is said to be defended has tests that carry its name, where the
page says, and no test carries the name of a rule that the page does not have."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from scripts.guards import GUARDS
from scripts.guards.guard import Guard

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "rules.md"
LAST = {"protocol": 52, "training": 21}

_ROW = re.compile(
    r"^\| (?P<number>(?:protocol|training)-\d+) \| (?P<rule>[a-z0-9-]+) \| (?P<text>.+) \| (?P<tests>.+) \|$"
)
_LINK = re.compile(r"\[[^\]]+\]\(\.\./(?P<path>tests/[^)]+)\)")


def _rows() -> list[re.Match[str]]:
    rows = [match for line in PAGE.read_text(encoding="utf-8").splitlines() if (match := _ROW.match(line))]
    assert len({row["rule"] for row in rows}) == len(rows), "two rules of docs/rules.md have one name"
    return rows


def page_rows() -> dict[str, str]:
    """Rule -> its last column."""
    return {row["rule"]: row["tests"] for row in _rows()}


@cache
def marked_tests() -> dict[str, set[str]]:
    """Rule -> the files with a test, a class of tests or a whole module that is marked with it."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.rule":
                assert len(node.args) == 1, f"{path}:{node.lineno}: a rule mark has one name"
                (name,) = node.args
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: a rule mark has a literal name"
                found.setdefault(str(name.value), set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_every_rule_is_on_the_page() -> None:
    expected = [f"{family}-{number}" for family, last in LAST.items() for number in range(1, last + 1)]
    assert sorted(expected) == sorted(row["number"] for row in _rows())


@pytest.mark.parametrize("rule", [rule for rule, tests in page_rows().items() if not tests.startswith("later: ")])
def test_a_defended_rule_has_tests_where_the_page_says(rule: str) -> None:
    listed = set(_LINK.findall(page_rows()[rule]))
    marked = marked_tests().get(rule, set())
    assert listed, f"docs/rules.md names no test for {rule}; marked are: {sorted(marked) or 'none'}"
    assert listed <= marked, f"docs/rules.md names {sorted(listed - marked)}, which have no test marked {rule}"


def test_no_test_is_marked_with_a_rule_that_does_not_exist() -> None:
    unknown = {rule: sorted(files) for rule, files in marked_tests().items() if rule not in page_rows()}
    assert not unknown


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.rule}: {guard.what}")
def test_a_guard_that_is_taken_out_stands_where_its_entry_says(guard: Guard) -> None:
    assert guard.text in (ROOT / guard.path).read_text(encoding="utf-8"), "move the entry along with the code"
    assert set(guard.tests) <= marked_tests()[guard.rule], "its tests carry the rule's name"
