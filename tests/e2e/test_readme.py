"""The README keeps its word: its example runs as pasted, its links lead somewhere, its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast_client import Client, ClientSettings
from holdfast_client.cli.output import ExitCode
from tests.support.serve import HOLDFAST, holdfast_serve, without_holdfast_settings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "deploy/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)


def python_example() -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return str(block)


def test_the_example_is_at_most_ten_lines() -> None:
    assert len(python_example().splitlines()) <= 10


def test_the_example_runs_as_pasted_and_resumes(tmp_path: Path) -> None:
    with holdfast_serve(tmp_path) as service:
        # Only the two settings that the README names: the token must not be found in a data folder.
        token = (tmp_path / "data" / "token").read_text().strip()
        environment = without_holdfast_settings() | {"HOLDFAST_URL": service.url, "HOLDFAST_TOKEN": token}
        environment["HOME"] = str(tmp_path)
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", python_example()],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, done.stderr
        with Client(ClientSettings(url=service.url, token=token)) as client:
            assert client.restores.restore_point("demo", "readme").restore_point is not None
            attempts = [attempt.number for attempt in client.attempts.all("demo", "readme")]
            assert sorted(attempts) == [1, 2]


def test_plain_values_are_read_back_as_the_quickstart_says(tmp_path: Path) -> None:
    """The block that says so runs as it stands, and prints what the page promises for each launch."""
    (block,) = re.findall(
        r"^<!-- tests/e2e/test_readme.py .*?-->\n```python\n(.*?)^```$", QUICKSTART, flags=re.MULTILINE | re.DOTALL
    )
    promised = re.findall(r"`(from step [^`]+)`", QUICKSTART)
    assert len(promised) == 2
    with holdfast_serve(tmp_path) as service:
        for line in promised:
            done = subprocess.run(
                [sys.executable, "-c", block],
                env=without_holdfast_settings() | service.environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines() == [line]


def test_the_commands_of_the_table_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| (`holdfast [^|]*)\|", README, flags=re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(?:holdfast )?([a-z-]+)`", row)}
    environment = without_holdfast_settings() | {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    help_text = subprocess.run(
        [HOLDFAST, "--help"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    offered = set(re.findall(r"^  ([a-z][a-z-]+) {2,}\S", help_text, flags=re.MULTILINE))
    assert listed == offered


def test_the_exit_codes_of_the_page_are_those_of_the_program() -> None:
    table = [line.strip() for line in str(ExitCode.__doc__).splitlines() if line.strip().startswith("|")]
    assert len(table) > 2
    assert "\n".join(table) in (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_within_the_repository_leads_to_a_file(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{target} does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    """In backquotes, with a folder and a suffix: `service/holdfast_service/app.py`."""
    names = re.findall(
        r"`((?:client|service|trainer_sdk|tests|examples|migrations|scripts|deploy|docs)/[\w./-]+)`",
        page.read_text("utf-8"),
    )
    for name in names:
        assert (ROOT / name).exists(), f"{name} does not exist"


def test_every_file_of_the_walks_exists() -> None:
    """ARCHITECTURE.md names files below the packages: each `….py` and each `folder/` must be in one of them."""
    packages = [
        ROOT / name
        for name in ("client", "client/holdfast_client", "service/holdfast_service", "trainer_sdk/holdfast", ".")
    ]
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    missing = [
        name
        for name in re.findall(r"`([\w./]+(?:\.py|/))`", text)
        if not any((package / name).exists() for package in packages)
    ]
    assert not missing
