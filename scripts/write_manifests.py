"""Renders deploy/helm/holdfast into the plain manifests of deploy/kubernetes, by Helm's own library.

`make manifests`, after a change of the chart; tests/e2e/test_kubernetes.py fails when they are out of date.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "holdfast"
PLAIN = ROOT / "deploy" / "kubernetes"
RELEASE = NAMESPACE = "holdfast"
_HELMS_OWN = re.compile(r"\s*(app\.kubernetes\.io/managed-by|helm\.sh/chart):")
_HEAD = "# Made by `make manifests` of deploy/helm/holdfast and values.yaml here: docs/operating/kubernetes.md.\n"


def helm() -> Any:
    """Helm's library, as scripts/prepare-wheel has installed it."""
    where = str(Path(sys.prefix) / "helm")
    if where not in sys.path:
        sys.path.append(where)
    import helm_python

    return helm_python


def rendered(values: dict[str, Any]) -> dict[str, str]:
    """The text of each template that renders to something, by its file's name. Raises HelmError, which names the value
    that is missing or wrong."""
    with helm().Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values))
        texts = chart.render(values, name=RELEASE, namespace=NAMESPACE, is_install=True)
    return {Path(path).name: text.strip() + "\n" for path, text in sorted(texts.items()) if text.strip()}


def manifests() -> dict[str, str]:
    """The files of deploy/kubernetes by name. The Job of migrations is a file of its own: it ends before the others are
    applied."""
    texts = rendered(yaml.safe_load((PLAIN / "values.yaml").read_text(encoding="utf-8")))
    texts.pop("NOTES.txt")
    migrate = texts.pop("migrate.yaml")
    rest = "---\n".join(text.removeprefix("---\n") for text in texts.values())
    return {"migrate.yaml": _HEAD + _plain(migrate), "holdfast.yaml": _HEAD + _plain(rest)}


def _plain(text: str) -> str:
    """Without what only Helm reads, and without the blanks that its templates leave."""
    lines = (line.rstrip() for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line and not _HELMS_OWN.match(line))


def main() -> None:
    subprocess.run([ROOT / "scripts" / "prepare-wheel", "helm", sys.prefix], check=True)
    for name, text in manifests().items():
        (PLAIN / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
