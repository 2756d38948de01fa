"""The tests that docs/threat-model.md names, and what CI asks of them: each is in the run, and none is skipped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "threat-model.md"
TEST = re.compile(r"\[(?P<shown>[^\]]+)\]\(\.\./tests/(?P<path>[^)]+\.py)\) `(?P<name>test_\w+)`")


def named_tests() -> set[tuple[str, str]]:
    """The file, below the repository, and the function of each."""
    return {(f"tests/{test['path']}", test["name"]) for test in TEST.finditer(PAGE.read_text(encoding="utf-8"))}


class NoneSkipped:
    """The plugin of `--threat-model`. A test of a suite for several stores is looked for in the suite's own file."""

    def __init__(self) -> None:
        self._named = named_tests()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        missing = self._named - set(map(_function_of, items))
        if missing:
            told = ", ".join(f"{path}::{name}" for path, name in sorted(missing))
            raise pytest.UsageError(f"docs/threat-model.md names tests that are not in this run: {told}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report: pytest.TestReport = yield
        if report.skipped and _function_of(item) in self._named:
            vars(report).pop("wasxfail", None)  # who expects the failure skips it likewise
            report.outcome = "failed"
            report.longrepr = f"docs/threat-model.md names this test, so it must not be skipped: {report.longrepr}"
        return report


def _function_of(item: pytest.Item) -> tuple[str, str]:
    path, _, _ = item.location
    return path, getattr(item, "originalname", item.name)
