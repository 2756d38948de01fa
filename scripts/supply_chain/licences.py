"""Writes docs/reference/licences.md: under which licences is what the image ships, and what a trainer's install brings.

`make lock` and `make sbom` write it, from the bill of materials and from this environment.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from packaging.requirements import Requirement
from scripts.supply_chain.bill import BILL
from scripts.supply_chain.installed import found_in, licence_of, licences_in, needed_by
from scripts.supply_chain.lock import ROOT

PAGE = ROOT / "docs/reference/licences.md"
# Whoever adds one says on the page what it asks of those who pass the image on.
ALLOWED = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "ISC",
        "LGPL-3.0-only",
        "MIT",
        "MIT-0",
        "MPL-2.0",
        "PSF-2.0",
        "Unlicense",
        "Zlib",
    }
)
_OF_CUDA = ("cuda-", "nvidia-")

_HEAD = """# Licences

Holdfast is under Apache-2.0. This page lists the licences of what comes with it; `make lock` and `make sbom` write it.
The versions and hashes are in the bill of materials, `deploy/sbom.cdx.json`. A test refuses a licence that is not on
the list in `scripts/supply_chain/licences.py`.

Most of them ask for their notice to be kept, which an installed package does by itself. These ask for more:

- `LGPL-3.0-only` (psycopg): it is installed as a package of its own, unchanged, and can be replaced by another version.
  Who passes the image on must allow that.
- `MPL-2.0` (certifi): a changed file of it stays under MPL-2.0. Holdfast changes none.

Not on this page: Debian's packages of the base image `python:3.12-slim`, which lists them itself (`/usr/share/doc`),
and the tools that build the page, the wheel and the documentation. They leave nothing in the image but some lines of
Vite (MIT) in the page.

## The service's packages

{service}
## The web page

What Vite puts into the page at `/ui/`.

{web}
## A trainer's install

What `pip install holdfast[torch]` brings with a torch for CPUs. The torch of PyPI for Linux brings NVIDIA's libraries
of CUDA, and Triton, besides, under licences of their own: read them there. Holdfast neither ships these nor asks for
them.

"""


def trainer() -> dict[str, str]:
    """What `pip install holdfast[torch]` brings here, and the licence of each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = found_in()
    needed = sorted(needed_by(trainer_wants(project), installed))
    return {name: licence_of(installed[name]) for name in needed if not name.startswith(_OF_CUDA)}


def trainer_wants(project: dict[str, Any]) -> list[Requirement]:
    """What pyproject.toml asks for in a trainer's image."""
    return [Requirement(each) for each in (*project["dependencies"], *project["optional-dependencies"]["torch"])]


def refused(licences: Mapping[str, str]) -> dict[str, str]:
    """Those packages of which a licence is not on the list."""
    return {name: said for name, said in licences.items() if not ALLOWED.issuperset(licences_in(said))}


def shipped() -> dict[str, dict[str, str]]:
    """By `pypi` and `npm`: name and licence of each component of the bill. Without those of other platforms."""
    found: dict[str, dict[str, str]] = {"pypi": {}, "npm": {}}
    for each in json.loads(BILL.read_text(encoding="utf-8"))["components"]:
        if stated := each.get("licenses"):
            name = f"{each['group']}/{each['name']}" if "group" in each else each["name"]
            said = stated[0].get("expression") or stated[0]["license"].get("id") or stated[0]["license"]["name"]
            found[each["purl"].partition(":")[2].partition("/")[0]][name] = said
    return found


def of_the_image() -> str:
    """The page without its last table, which depends on what is installed here."""
    ships = shipped()
    return _HEAD.format(service=table(ships["pypi"]), web=table(ships["npm"]))


def write() -> None:
    """The whole page. ValueError for a licence that is not on the list."""
    found = trainer()
    for licences in (*shipped().values(), found):
        if bad := refused(licences):
            raise ValueError(f"not on the list of licences: {bad}")
    PAGE.write_text(of_the_image() + table(found), encoding="utf-8")


def table(licences: dict[str, str]) -> str:
    rows = "".join(f"| {name} | {licence} |\n" for name, licence in sorted(licences.items()))
    return f"| package | licence |\n| --- | --- |\n{rows}"
