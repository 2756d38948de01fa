"""Writes deploy/requirements.lock: every package of the container image, with its version and its files' hashes.

    python -m scripts.supply_chain.lock          choose versions anew, list them, and their licences
    python -m scripts.supply_chain.lock --list   list again what is locked

uv chooses, for each Python and each platform that Holdfast supports. Then the lock is installed once, as the image does
it: that proves it, and what was installed tells its licences. No host of an index stands in the files; pip and uv take
the one that is set up where they run, and accept no other bytes than these.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "deploy/requirements.lock"
BUILD_LOCK = ROOT / "deploy/requirements-build.lock"
# What the image installs: deploy/Dockerfile.
EXTRAS = ("service", "gcs", "azure")
_PYTHON = "3.11"  # the oldest that is supported; markers say what newer ones need
# The image's own Python and platforms: there is a wheel of each package for them, or the lock is not written.
_IMAGE_PYTHON = "3.12"
_IMAGE_PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
_SAFELY = ("--require-hashes", "--no-deps", "--only-binary", ":all:", "-r")
_HASH = re.compile(r"--hash=sha256:(\S+)")
_HEAD = """\
# {what}: versions, and the SHA-256 of each of their files.
# Written by `make lock`; not for editing. Install it with: pip install --require-hashes --no-deps --only-binary :all:
"""


@dataclass(frozen=True, slots=True)
class Pin:
    """One package of a lock. `hashes` are hexadecimal SHA-256, of all files of the release."""

    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        return next(iter(self.requirement.specifier)).version


def pins_of(lock: str) -> list[Pin]:
    """The packages of a lock's text. ValueError for a line that is none, or that pins no version."""
    pins = []
    for line in lock.replace("\\\n", " ").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        requirement = Requirement(line.partition("--hash")[0].strip())
        if [each.operator for each in requirement.specifier] != ["=="] or requirement.url:
            raise ValueError(f"the lock pins no version: {line}")
        pins.append(Pin(requirement, tuple(_HASH.findall(line))))
    return pins


def _uv(*arguments: str | Path) -> None:
    certificates = os.environ.get("SSL_CERT_FILE") or os.environ.get("PIP_CERT")
    environment = {**os.environ, **({"SSL_CERT_FILE": certificates} if certificates else {})}
    subprocess.run([sys.executable, "-m", "uv", *arguments, "--quiet"], check=True, env=environment, cwd=ROOT)


def _compile(source: str, what: str, target: Path, options: Sequence[str] = ()) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "lock")
        _uv(
            *("pip", "compile", source, *options, "--universal", "--python-version", _PYTHON, "--generate-hashes"),
            *("--only-binary", ":all:", "--constraint", "constraints.txt", "--no-header", "--output-file", found),
        )
        target.write_text(_HEAD.format(what=what) + found.read_text(encoding="utf-8"), encoding="utf-8")


def install(lock: Path, environment: Path) -> Path:
    """Makes a virtual environment of a lock, and returns its folder of packages. Nothing of a package runs meanwhile:
    there are only wheels."""
    _uv("venv", "--python", sys.executable, environment)
    python = environment / "bin/python"
    _uv("pip", "install", "--python", python, *_SAFELY, lock)
    return next(environment.glob("lib/python3*/site-packages"))


def _fits_the_image(lock: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for platform in _IMAGE_PLATFORMS:
            where = ("--python", sys.executable, "--python-version", _IMAGE_PYTHON, "--python-platform", platform)
            _uv("pip", "install", "--dry-run", "--target", folder, *where, *_SAFELY, lock)


def main(arguments: Sequence[str]) -> None:
    from scripts.supply_chain import bill, licences

    if "--list" not in arguments:
        extras = [option for extra in EXTRAS for option in ("--extra", extra)]
        _compile("pyproject.toml", f"What the image installs, holdfast[{','.join(EXTRAS)}]", LOCK, extras)
        with tempfile.TemporaryDirectory() as folder:
            wanted = Path(folder, "build.in")
            wanted.write_text("hatchling\n", encoding="utf-8")
            _compile(str(wanted), "What builds the wheel of the image", BUILD_LOCK, ("--no-annotate",))
    for lock in (LOCK, BUILD_LOCK):
        _fits_the_image(lock)
    with tempfile.TemporaryDirectory() as folder:
        bill.write(install(LOCK, Path(folder, "installed")))
    licences.write()


if __name__ == "__main__":
    main(sys.argv[1:])
