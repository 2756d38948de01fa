"""docs/reference/access.md is what scripts/write_access_page.py makes of the routes: who may call each of them."""

from __future__ import annotations

import runpy
from pathlib import Path

from holdfast_service.app import openapi_document

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "write_access_page.py"


def test_the_page_is_current_and_has_every_documented_route() -> None:
    script = runpy.run_path(str(SCRIPT))
    text = script["PAGE"].read_text(encoding="utf-8")
    assert text == script["page"](), "run `make docs`, and look at who may call what from now on"
    for path, methods in openapi_document()["paths"].items():
        for method in methods:
            assert f"| {method.upper()} | `{path}` |" in text
