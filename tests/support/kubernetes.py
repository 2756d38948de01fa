"""The manifests of deploy/kubernetes and examples/kubernetes, read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
OLDEST, NEWEST = "1.31", "1.37"
# No schema of these comes with Kubernetes: docs/operating/kubernetes.md says how they were checked.
CUSTOM = ("ServiceMonitor", "JobSet", "ResourceFlavor", "ClusterQueue", "LocalQueue", "WorkloadPriorityClass")


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def plain() -> list[dict[str, Any]]:
    return [
        each
        for name in ("migrate", "holdfast")
        for each in documents((ROOT / f"deploy/kubernetes/{name}.yaml").read_text())
    ]


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    return dict(workload["spec"]["template"]["spec"])


def pods(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pods of Deployments and Jobs by the name of these."""
    return {each["metadata"]["name"]: pod_of(each) for each in found if each["kind"] in ("Deployment", "Job")}


def jobs(file: Path) -> list[dict[str, Any]]:
    """The Jobs of a file; those within a JobSet too, as the Jobs that it makes."""
    found = documents(file.read_text())
    within = [each["template"] for one in found if one["kind"] == "JobSet" for each in one["spec"]["replicatedJobs"]]
    made = [{"apiVersion": "batch/v1", "kind": "Job", **each} for each in within]
    return [each for each in found if each["kind"] == "Job"] + made


def check_strictly(found: list[dict[str, Any]]) -> None:
    import kubernetes_validate  # takes three seconds: only the test process that needs it pays them

    for document in found:
        if document["kind"] not in CUSTOM:
            for version in (OLDEST, NEWEST):
                kubernetes_validate.validate(document, version, strict=True)


def env_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return {each["name"]: each.get("value") for each in container["env"]}
