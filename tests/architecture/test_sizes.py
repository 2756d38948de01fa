"""A file is read in one sitting: no module of the packages has more than 400 lines, none is a drawer for anything."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 400
DRAWERS = {"utils", "helpers", "common", "manager", "misc", "util", "helper"}
MODULES = sorted(path for folder in ("client", "service", "trainer_sdk") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_is_short_named_for_its_content_and_says_its_place(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert not DRAWERS & {path.stem, *path.relative_to(ROOT).parts}
    first = next((line for line in text.splitlines() if not line.startswith("#")), "")
    assert not text or first.startswith('"""'), "the first lines say what the module is for"
