"""deploy/Dockerfile without Docker: its stages as folders, with what .dockerignore lets through, and the same commands.

What differs is only the base images: npm and hatchling are those of this machine.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pytest
from scripts.supply_chain.lock import ROOT

from tests.support.prepare import NotHereError, prepare

IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8")
STATIC = "holdfast_service/ui/static"


@dataclass
class Stage:
    """One FROM and what follows it: the words of each COPY, the commands of each RUN."""

    base: str
    folder: str = "/"
    copies: list[list[str]] = field(default_factory=list)
    runs: list[list[str]] = field(default_factory=list)


def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    stage = Stage("")
    text = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        instruction, _, rest = line.partition(" ")
        words = rest.split()
        if instruction == "FROM":
            stage = found[words[-1]] = Stage(words[0])
        elif instruction == "WORKDIR":
            stage.folder = rest
        elif instruction == "COPY":
            stage.copies.append(words)
        elif instruction == "RUN":
            stage.runs += [shlex.split(step) for step in rest.split("&&")]
    return found


def is_sent(path: str, ignored: str = IGNORED) -> bool:
    """Whether Docker's client sends it: the last line that names it, or a folder above it, counts."""
    sent = True
    for line in ignored.splitlines():
        if line and not line.startswith("#"):
            pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
            if re.fullmatch(f"{pattern}(?:/.*)?", path):
                sent = line.startswith("!")
    return sent


def copied(source: str, to: Path, *, into: bool) -> None:
    """As COPY does it: the content of a folder, or a file; `into`: below `to`, which is a folder."""
    if (ROOT / source).is_file():
        assert is_sent(source), source
        target = to / PurePosixPath(source).name if into else to
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, target)
        return
    for above, folders, files in os.walk(ROOT / source):
        place = Path(above).relative_to(ROOT)
        folders[:] = [name for name in folders if is_sent(f"{place}/{name}")]
        for name in files:
            if is_sent(f"{place}/{name}"):
                target = to / place.relative_to(source) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(above, name), target)


def laid_out(stage: Stage, root: Path, others: Path) -> Path:
    """The stage's file system below `root`; other stages lie in `others` by name. Returns its working folder."""
    folder = root / stage.folder.lstrip("/")
    for copy in stage.copies:
        *sources, to = (word for word in copy if not word.startswith("--"))
        origins = [word.removeprefix("--from=") for word in copy if word.startswith("--from=")]
        target = folder / to
        for source in sources:
            if origins:
                shutil.copytree(others / origins[0] / source.lstrip("/"), target, dirs_exist_ok=True)
            else:
                copied(source, target, into=to.endswith("/"))
    return folder


def test_what_is_copied_is_there_and_sent() -> None:
    sources = {
        source
        for stage in stages().values()
        for copy in stage.copies
        if not copy[0].startswith("--from")
        for source in copy[:-1]
    }
    assert {"service", "web", "deploy/requirements.lock"} <= sources
    for source in sources:
        assert (ROOT / source).exists(), f"the Dockerfile copies {source}, which is not there"
        assert is_sent(source), f"the Dockerfile copies {source}, which .dockerignore keeps back"


def test_nothing_that_was_made_here_and_no_secret_is_sent() -> None:
    for path in (".env", ".venv/bin/python", ".git/config", "web/node_modules/x/index.js", "tests/conftest.py"):
        assert not is_sent(path), path
    assert not is_sent(f"service/{STATIC}/index.html")
    assert not is_sent("client/holdfast_client/__pycache__/client.cpython-312.pyc")
    assert is_sent("web/src/app/routes.ts")


def test_both_base_images_are_named_by_an_argument_with_a_version() -> None:
    lines = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8").splitlines()
    given = dict(line.removeprefix("ARG ").split("=", 1) for line in lines if line.startswith("ARG "))
    for stage in stages().values():
        assert re.search(r":\d", given[stage.base.strip("${}")]), stage.base


@pytest.mark.slow
def test_the_stages_build_a_wheel_that_has_the_page(tmp_path: Path) -> None:
    try:
        prepare("web", "web", sys.prefix)
    except NotHereError as missing:
        # pip cannot install Node.js.
        pytest.skip(str(missing))
    found = stages()
    page = laid_out(found["page"], tmp_path / "page", tmp_path)
    for command in found["page"].runs:
        assert command[0] == "npm"
        subprocess.run(command, cwd=page, check=True, capture_output=True, timeout=500)
    build = laid_out(found["build"], tmp_path / "build", tmp_path)
    (hatchling,) = (command for command in found["build"].runs if command[0].endswith("/hatchling"))
    words = [word.replace("/wheel", f"{tmp_path}/wheel") for word in hatchling[1:]]
    subprocess.run([sys.executable, "-m", "hatchling", *words], cwd=build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    built = page.parent / "service" / STATIC
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith(f"{STATIC}/")}
        assert names == {f"{STATIC}/{path.relative_to(built)}" for path in built.rglob("*") if path.is_file()}
        index = archive.read(f"{STATIC}/index.html").decode()
    asked = re.findall(r'(?:src|href)="/ui/([^"]*)"', index)
    assert asked
    assert {f"{STATIC}/{path}" for path in asked} <= names
