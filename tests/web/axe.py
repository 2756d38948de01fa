"""axe-core, of the page's own packages, on a page that a test has opened.

It is run through the browser's debugger, so that the page's policy stays as it is."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

_SOURCE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
_GRAVE = {"serious", "critical"}


@cache
def _source() -> str:
    return _SOURCE.read_text(encoding="utf-8")


def grave_violations(page: Page, *rules: str) -> list[str]:
    """Of impact serious or critical, a line for each element: the rule, where it is, and what axe says. `rules`: these
    alone; none means all."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(_source())
    found: list[dict[str, Any]] = page.evaluate(
        """async rules => (await axe.run(document, {resultTypes: ['violations'], preload: false,
            ...(rules.length ? {runOnly: rules} : {})})).violations""",
        list(rules),
    )
    return [
        f"{rule['id']}: {' '.join(map(str, node['target']))}: {node['failureSummary']}"
        for rule in found
        if rule["impact"] in _GRAVE
        for node in rule["nodes"]
    ]
