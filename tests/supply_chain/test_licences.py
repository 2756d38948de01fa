"""docs/reference/licences.md is current, and nothing is shipped under a licence that nobody has agreed to."""

from __future__ import annotations

import tomllib
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from scripts.supply_chain import licences
from scripts.supply_chain.installed import found_in, licence_of
from scripts.supply_chain.licences import ALLOWED, PAGE, of_the_image, refused, shipped, trainer, trainer_wants
from scripts.supply_chain.lock import ROOT


@pytest.mark.parametrize("kind", ["pypi", "npm"])
def test_what_the_image_ships_is_under_licences_that_are_on_the_list(kind: str) -> None:
    assert len(shipped()[kind]) > 30
    assert not refused(shipped()[kind])


def test_what_a_trainer_installs_is_under_licences_that_are_on_the_list() -> None:
    assert {"torch", "httpx", "safetensors"} <= trainer().keys()
    assert not refused(trainer())


def test_the_page_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(of_the_image()), "run `make sbom`"
    # Newer releases may bring others with them, and do not make the page wrong from one day to the next.
    last = text.removeprefix(of_the_image())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for each in trainer_wants(project):
        assert f"| {each.name} | " in last, "run `make sbom`"
    rows = [line.strip("| ").split(" | ") for line in last.splitlines()[2:]]
    assert not refused(dict(rows))


def test_each_licence_that_asks_for_more_than_its_notice_is_explained() -> None:
    for licence in ALLOWED & {"LGPL-3.0-only", "MPL-2.0"}:
        assert f"- `{licence}`" in PAGE.read_text(encoding="utf-8")


def distribution(folder: Path, *lines: str) -> Distribution:
    home = folder / "strange-1.0.dist-info"
    home.mkdir(exist_ok=True)
    (home / "METADATA").write_text("\n".join(("Metadata-Version: 2.4", "Name: strange", "Version: 1.0", *lines, "")))
    return found_in(folder)["strange"]


@pytest.mark.parametrize(
    ("line", "licence"),
    [
        ("License-Expression: GPL-3.0-only", "GPL-3.0-only"),
        ("License-Expression: MIT AND AGPL-3.0-or-later", "MIT AND AGPL-3.0-or-later"),
        ("License: SSPL-1.0", "SSPL-1.0"),
    ],
)
def test_a_package_under_another_licence_is_refused(tmp_path: Path, line: str, licence: str) -> None:
    found = {"strange": licence_of(distribution(tmp_path, line))}
    assert refused(found) == {"strange": licence}


def test_metadata_that_raise_for_what_they_do_not_have_are_read_too(tmp_path: Path) -> None:
    """importlib_metadata does, and finds packages for the whole process once something has imported it."""
    pytest.importorskip("importlib_metadata")
    assert licence_of(distribution(tmp_path, "License-Expression: MIT")) == "MIT"
    assert licence_of(distribution(tmp_path, "License: MIT")) == "MIT"


def test_the_page_is_not_written_with_a_licence_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(licences, "PAGE", tmp_path / "licences.md")
    monkeypatch.setattr(licences, "trainer", lambda: {"strange": "GPL-3.0-only"})
    with pytest.raises(ValueError, match="not on the list"):
        licences.write()
    assert not (tmp_path / "licences.md").exists()


def test_a_package_that_does_not_tell_its_licence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not tell its licence"):
        licence_of(distribution(tmp_path, "License: see the file"))
