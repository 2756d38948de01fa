"""docs/reference/dashboard-views.md is what scripts/write_dashboard_views_page.py makes of the views."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "write_dashboard_views_page.py"


def test_the_page_is_current() -> None:
    script = runpy.run_path(str(SCRIPT))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run `make docs`"
