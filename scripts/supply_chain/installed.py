"""What is installed in a folder of packages: which package needs which, and under which licence each one is."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# How packages call their licence, where it is no SPDX expression.
_SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "ISC License": "ISC",
    "MIT License": "MIT",
}
# Their metadata say "BSD", or nothing that is one licence. Read from the files that they bring.
_READ = {
    "isodate": "BSD-3-Clause",
    "jinja2": "BSD-3-Clause",
    "mpmath": "BSD-3-Clause",
    "pyasn1-modules": "BSD-2-Clause",
    "python-dateutil": "Apache-2.0 AND BSD-3-Clause",
    "sympy": "BSD-3-Clause",
}


def found_in(folder: Path | None = None) -> dict[str, Distribution]:
    """By normalized name; in this process's own environment without a folder."""
    found = distributions() if folder is None else distributions(path=[str(folder)])
    return {canonicalize_name(each.name): each for each in found}


def needed_by(wanted: Iterable[Requirement], installed: Mapping[str, Distribution]) -> dict[str, set[str]]:
    """Each package that these requirements bring, on this platform, and which others it asks for. KeyError for one that
    is not installed."""
    edges: dict[str, set[str]] = {}
    asked: set[tuple[str, str]] = set()
    queue = deque((canonicalize_name(each.name), extra) for each in wanted for extra in ("", *each.extras))
    while queue:
        if (asking := queue.popleft()) in asked:
            continue
        asked.add(asking)
        name, extra = asking
        needs = edges.setdefault(name, set())
        for each in map(Requirement, installed[name].requires or ()):
            if (each.marker is None and extra) or (each.marker and not each.marker.evaluate({"extra": extra})):
                continue
            needs.add(inner := canonicalize_name(each.name))
            queue.extend((inner, more) for more in ("", *each.extras))
    return edges


def licence_of(found: Distribution) -> str:
    """As an SPDX expression. ValueError for a package that does not say it."""
    name, metadata = canonicalize_name(found.name), found.metadata
    if name in _READ:
        return _READ[name]
    classifiers = [each.rpartition(" :: ")[2] for each in metadata.get_all("Classifier", []) if "License ::" in each]
    for said in (metadata.get("License-Expression"), metadata.get("License"), *classifiers):
        try:
            return canonicalize_license_expression(_SPDX.get(str(said), str(said)))
        except InvalidLicenseExpression:
            continue
    raise ValueError(f"{name} does not tell its licence as SPDX does; read its files, and write it into {__file__}")


def licences_in(expression: str) -> list[str]:
    """The single licences of an SPDX expression, with their exceptions."""
    return [each.strip(" ()") for each in re.split(r" AND | OR ", expression)]
