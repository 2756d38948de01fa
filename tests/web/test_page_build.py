"""The web page: its types are those of the API, it is built, its own tests pass, and it keeps to its policy (CSP)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from scripts.web_schema import SCHEMA, document, first_line

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "web"


@pytest.fixture(scope="module")
def page(page_folder: Path) -> str:
    """index.html, built."""
    return (page_folder / "index.html").read_text(encoding="utf-8")


def npm(*arguments: str) -> str:
    program = shutil.which("npm")
    assert program, "scripts/prepare-web has found a Node that is not on the PATH: put it there for the tests"
    ran = subprocess.run([program, "run", "--silent", *arguments], cwd=WEB, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_types_of_the_page_are_those_of_the_api() -> None:
    found = SCHEMA.read_text(encoding="utf-8").splitlines(keepends=True)[0]
    assert found == first_line(document()), "the API has changed: python -m scripts.web_schema"


def test_the_lock_names_no_registry() -> None:
    assert '"resolved"' not in (WEB / "package-lock.json").read_text(encoding="utf-8")


def test_the_page_has_no_inline_script_or_style_and_loads_nothing_from_elsewhere(page: str) -> None:
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
    assert re.findall(r"<script[^>]*>([^<]*)</script>", page) == [""]
    assert all(url.startswith("/ui/") for url in re.findall(r'(?:src|href)="([^"]*)"', page))


def test_a_first_visit_loads_little(page: str) -> None:
    assert "initial load" in npm("initial-load")  # fails above its limit


def test_the_sources_keep_to_the_style_and_the_types(page: str) -> None:
    npm("check")


@pytest.mark.timeout(1200)
def test_the_components_do_what_they_say(page: str) -> None:
    npm("test")
