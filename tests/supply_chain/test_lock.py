"""deploy/requirements.lock is what pyproject.toml asks for, and the image installs these bytes and no others."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from scripts.supply_chain.bill import wanted
from scripts.supply_chain.lock import BUILD_LOCK, LOCK, ROOT, pins_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCKS = pytest.mark.parametrize("lock", [LOCK, BUILD_LOCK], ids=lambda path: path.name)


def locked(lock: Path) -> dict[str, str]:
    return {pin.name: pin.version for pin in pins_of(lock.read_text(encoding="utf-8"))}


def test_it_has_what_the_image_asks_for_in_versions_that_it_may_have() -> None:
    pins = locked(LOCK)
    for each in wanted(PROJECT["project"]):
        assert each.specifier.contains(pins[canonicalize_name(each.name)], prereleases=True), each


def test_what_builds_the_wheel_is_locked_too() -> None:
    pins = locked(BUILD_LOCK)
    for each in map(Requirement, PROJECT["build-system"]["requires"]):
        assert each.specifier.contains(pins[each.name], prereleases=True), each


@LOCKS
def test_no_version_is_one_that_the_constraints_refuse(lock: Path) -> None:
    pins = locked(lock)
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for each in (Requirement(line) for line in text.splitlines() if line and not line.startswith("#")):
        if (name := canonicalize_name(each.name)) in pins:
            assert each.specifier.contains(pins[name], prereleases=True), each


@LOCKS
def test_each_package_has_the_hashes_of_all_its_files(lock: Path) -> None:
    """A release has a wheel and its source, or a wheel for each platform. One file alone is looked at by a person
    first: who has taken over a package's account often sends no more."""
    for pin in pins_of(lock.read_text(encoding="utf-8")):
        assert len(set(pin.hashes)) > 1, pin.name
        assert all(re.fullmatch("[0-9a-f]{64}", each) for each in pin.hashes), pin.name


@LOCKS
def test_no_index_stands_in_it(lock: Path) -> None:
    """Else the image would come from where the one who renewed the lock had it from."""
    text = lock.read_text(encoding="utf-8")
    assert "://" not in text
    assert not re.search(r"^\s*-", re.sub(r"^\s+--hash=sha256:", "", text, flags=re.MULTILINE), re.MULTILINE)


def installs() -> list[list[str]]:
    """Each `pip install` of the Dockerfile, without the program."""
    text = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    steps = [step for line in text.splitlines() if line.startswith("RUN ") for step in line[4:].split("&&")]
    return [words[1:] for words in map(shlex.split, steps) if words[0].endswith("/pip") and words[1] == "install"]


def test_the_image_installs_what_is_locked_or_what_it_has_built() -> None:
    safely = ["install", "--require-hashes", "--no-deps", "--only-binary", ":all:", "-r"]
    assert installs() == [
        [*safely, "deploy/requirements.lock"],
        [*safely, "deploy/requirements-build.lock"],
        ["install", "--no-index", "--no-deps", "/wheel/*.whl"],
    ]


def wheel(folder: Path, content: str) -> Path:
    path = folder / "harmless-1.0-py3-none-any.whl"
    files = {
        "harmless.py": content,
        "harmless-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: harmless\nVersion: 1.0\n",
        "harmless-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "harmless-1.0.dist-info/RECORD": "".join(
            f"harmless-1.0.dist-info/{name},,\n" for name in ("METADATA", "WHEEL", "RECORD")
        )
        + "harmless.py,,\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return path


def pip(arguments: list[str], index: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """With an index that is a folder, and without this machine's own settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    where = ["--no-index", "--find-links", str(index), "--target", str(target)]
    command = [sys.executable, "-m", "pip", *arguments, *where]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_package_that_the_index_has_changed_is_not_installed(tmp_path: Path) -> None:
    index, lock = tmp_path / "index", tmp_path / "lock"
    index.mkdir()
    digest = hashlib.sha256(wheel(index, "").read_bytes()).hexdigest()
    lock.write_text(f"harmless==1.0 --hash=sha256:{digest}\n")
    arguments = [*installs()[0][:-1], str(lock)]
    done = pip(arguments, index, tmp_path / "first")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "first/harmless.py").is_file()

    wheel(index, "import os\n")
    done = pip(arguments, index, tmp_path / "second")
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "second").exists()
