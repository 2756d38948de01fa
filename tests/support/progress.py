"""What a run of the tests says while it goes on: each failure at once, and each minute how far it is.

A run that is cut off never gets to pytest's own list of failures at the end.
"""

from __future__ import annotations

import time

import pytest

_EVERY_SECONDS = 60


class Progress:
    """A plugin for the process that prints: with xdist, the one that has no tests of its own."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = self._said = time.monotonic()
        self._slowest: pytest.TestReport | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._say(f"{report.when} of {report.nodeid} failed:\n{report.longreprtext}")
        if self._slowest is None or report.duration > self._slowest.duration:
            self._slowest = report
        if time.monotonic() > self._said + _EVERY_SECONDS:
            self._said = time.monotonic()
            self._say(f"slowest since the last line: {self._slowest.duration:.0f} s, {self._slowest.nodeid}")
            self._slowest = None

    def _say(self, what: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        assert isinstance(reporter, pytest.TerminalReporter)
        reporter.ensure_newline()
        reporter.write_line(f"{(time.monotonic() - self._began) / 60:.0f} min: {what}")
