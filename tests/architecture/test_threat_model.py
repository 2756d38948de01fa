"""docs/threat-model.md and the tests agree: each line of its tables names a test that is there, and that CI does not
skip: `pytest --threat-model`."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.threat_model import PAGE, ROOT, TEST, named_tests

_ROW = re.compile(r"^\| (?P<cannot>.+?) \| (?P<because>.+?) \| (?P<tests>.+) \|$")


def rows() -> list[re.Match[str]]:
    found = [match for line in PAGE.read_text(encoding="utf-8").splitlines() if (match := _ROW.match(line))]
    return [row for row in found if row["cannot"] not in ("cannot", "---")]


@cache
def functions_of(path: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: node for node in functions}


def test_each_line_of_a_table_is_read() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    heads = [line for line in lines if line.startswith("| cannot |")]
    assert len(rows()) > 60
    assert len([line for line in lines if line.startswith("|")]) == len(rows()) + 2 * len(heads)


@pytest.mark.parametrize("row", rows(), ids=lambda row: re.sub(r"\W+", "-", row["cannot"]))
def test_what_an_actor_cannot_do_is_held_by_a_test_that_is_there(row: re.Match[str]) -> None:
    named = list(TEST.finditer(row["tests"]))
    assert named, "it names no test"
    assert TEST.sub("", row["tests"]).strip(", ") == "", "a test is named by its file and its function"
    for test in named:
        assert test["shown"] == test["path"]
        path = ROOT / "tests" / test["path"]
        assert path.is_file(), test["path"]
        assert test["name"] in functions_of(path), f"{test['path']} has no {test['name']}"


def test_none_of_them_is_always_skipped() -> None:
    """What is skipped on some machines is a matter of the run: see below."""
    for path, name in sorted(named_tests()):
        function = functions_of(ROOT / path)[name]
        marks = [ast.unparse(each) for each in function.decorator_list]
        body = [ast.unparse(each) for each in function.body]
        always = [line for line in (*marks, *body) if re.match(r"pytest\.(mark\.(skip|xfail)\b|skip\b|xfail\b)", line)]
        assert not always, f"{path} skips {name}: {always[0]}"


_CONFTEST = """
import pytest
from tests.support.threat_model import NoneSkipped

def pytest_configure(config):
    plugin = NoneSkipped()
    plugin._named = {("test_one.py", name) for name in NAMES}
    config.pluginmanager.register(plugin)
"""
# The run that is looked at: a test that is skipped in part, one that fails as expected, and one that nobody names.
_TESTS = """
import pytest

@pytest.mark.parametrize("tool", ["here", "missing"])
def test_named(tool):
    if tool == "missing":
        pytest.skip("there is no Node.js")

@pytest.mark.xfail
def test_expected_to_fail():
    raise RuntimeError

def test_other():
    pytest.skip("nobody names it")
"""


@pytest.mark.parametrize(
    ("names", "told", "code"),
    [
        ({"test_named", "test_expected_to_fail"}, "2 failed, 1 passed, 1 skipped", 1),
        ({"test_that_is_not_there"}, "names tests that are not in this run: test_one.py::test_that_is_not_there", 4),
    ],
)
def test_a_run_in_which_one_of_them_is_skipped_fails(tmp_path: Path, names: set[str], told: str, code: int) -> None:
    (tmp_path / "conftest.py").write_text(_CONFTEST.replace("NAMES", repr(names)))
    (tmp_path / "test_one.py").write_text(_TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "400", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, told in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr


def test_ci_asks_for_it() -> None:
    assert "--threat-model" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
