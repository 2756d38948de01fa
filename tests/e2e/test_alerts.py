"""deploy/prometheus: promtool accepts the rules, each alert is tested in both directions, and says what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.prometheus import DEPLOYED, deployed_at, promtool

ROOT = Path(__file__).resolve().parents[2]
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((DEPLOYED / "rules.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
pytestmark = pytest.mark.usefixtures("prometheus_tools")
NEVER, ALWAYS = "vector(0) > 1", "vector(1)"


def test_promtool_accepts_the_rules_and_their_tests_pass() -> None:
    for command in (("check", "rules", DEPLOYED / "rules.yml"), ("test", "rules", DEPLOYED / "rules_test.yml")):
        done = promtool(*command)
        assert done.returncode == 0, done.stdout


def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    configuration = deployed_at(tmp_path / "prometheus", "127.0.0.1:8400", "hold_x", {"node": "node-1:9100"})
    done = promtool("check", "config", configuration)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("alert", ALERTS)
@pytest.mark.parametrize("expression", [NEVER, ALWAYS])
def test_an_alert_that_never_fires_or_always_fires_fails_its_tests(alert: str, expression: str, tmp_path: Path) -> None:
    rules = yaml.safe_load((DEPLOYED / "rules.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") == alert:
                rule["expr"] = expression
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    tests = yaml.safe_load((DEPLOYED / "rules_test.yml").read_text())
    tests["tests"] = [each for each in tests["tests"] if alert in each["name"]]
    (tmp_path / "rules_test.yml").write_text(yaml.safe_dump(tests))
    done = promtool("test", "rules", tmp_path / "rules_test.yml")
    assert done.returncode != 0, "no test of it notices"
    assert alert in done.stdout


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_how_bad_it_is_and_what_to_do(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor == alert.lower()
    assert re.search(rf"^### {alert}$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert f"| [{alert}](#{anchor}) |" in (ROOT / page).read_text(encoding="utf-8"), "it is not in the table"
    told = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert told <= labels_of(rule["expr"]), "it tells a label that its series do not have"


def labels_of(expression: str) -> set[str]:
    """What a rule's series keep: what it groups by, or all of `up`."""
    kept = {name for names in re.findall(r"\bby \(([^)]*)\)", expression) for name in names.split(", ")}
    if "holdfast:run_host" in expression:
        kept |= {"project", "run", "host"}
    return kept if kept or "up{" not in expression else {"job", "instance"}


def test_the_page_and_the_dashboards_call_late_what_the_alert_calls_late() -> None:
    numbers = set(re.findall(r"(?:>|<=) (\d+)", ALERTS["HoldfastNoRestorePoint"]["expr"]))
    page = (ROOT / "web" / "src" / "overview" / "attention.ts").read_text()
    numbers |= set(re.findall(r"RESTORE_POINT_LATE_SECONDS = (.+);", page))
    dashboards = yaml.safe_load((ROOT / "deploy" / "grafana" / "dashboards.yml").read_text())
    panels = [panel for each in dashboards for row in each["rows"] for panel in row]
    shown = {
        str(panel["bad_above"]) for panel in panels if panel["title"].endswith(("estore point's age", "restore points"))
    }
    assert numbers == shown == {"7200"}
