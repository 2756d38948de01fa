"""A file is read in one sitting: no module of the packages and no file of the tests has more than 600 lines, none is a
drawer for anything, and the first lines say what it is for. A folder of the packages and of the web page is seen at a
glance."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 600
MOST_FILES = 20
MOST_OF_A_NAME = 3
EVERYWHERE = {"__init__.py", "controller.py", "endpoints.py", "metrics.py"}
PACKAGES = ("client", "service", "trainer_sdk")
PAGE = ROOT / "web" / "src"
MADE = {"schema.d.ts"}  # by scripts/web_schema.py
DRAWERS = {"utils", "helpers", "common", "manager", "misc", "util", "helper"}
FOLDERS = ("client", "service", "trainer_sdk", "tests", "scripts", "benchmarks", "examples")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_module_is_short_named_for_its_content_and_says_its_place(folder: str) -> None:
    refused = {
        path.relative_to(ROOT).as_posix(): why for path in (ROOT / folder).rglob("*.py") if (why := _defects(path))
    }
    assert not refused


def _defects(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    first = next((line for line in text.splitlines() if not line.startswith("#")), "")
    found = {
        "it is too long": len(text.splitlines()) > MOST_LINES,
        "its name says nothing": bool(DRAWERS & {path.stem, *path.relative_to(ROOT).parts}),
        "its first lines do not say what it is for": bool(text) and not first.startswith('"""'),
    }
    return [why for why, is_so in found.items() if is_so]


def test_no_folder_is_a_drawer() -> None:
    files = Counter(path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    files.update(path.parent for path in PAGE.rglob("*") if path.is_file())
    assert not {folder.relative_to(ROOT).as_posix(): count for folder, count in files.items() if count > MOST_FILES}


def test_a_files_name_tells_it_from_the_others() -> None:
    names = Counter(path.name for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert not {name: count for name, count in names.items() if count > MOST_OF_A_NAME}.keys() - EVERYWHERE


def test_a_file_of_the_page_is_short_and_alone_with_its_name() -> None:
    """A disk that does not tell `Timeline.tsx` from `timeline.tsx` may find either for the other's import."""
    sources = [path for path in PAGE.rglob("*.ts*") if path.name not in MADE]
    too_long = [path.name for path in sources if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES]
    assert not too_long
    names = Counter(path.with_suffix("").as_posix().lower() for path in sources)
    assert not [name for name, count in names.items() if count > 1]
