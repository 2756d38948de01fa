"""`holdfast doctor`: shows each check's finding and what to mend; the exit code is the first failure's."""

from __future__ import annotations

import typer

from holdfast_client.cli.arguments import JsonOption
from holdfast_client.cli.connect import connect
from holdfast_client.cli.doctor.checks import check_all
from holdfast_client.cli.doctor.finding import Finding, Verdict
from holdfast_client.cli.show import show_facts, show_json


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(json: JsonOption = False) -> None:
    """Check the way to the service and its store, and say what to mend. A sample goes there and back; nothing stays."""
    findings: list[Finding] = []
    with connect() as client:
        for finding in check_all(client):
            findings.append(finding)
            if not json:
                _show(finding)
    if json:
        show_json(findings)
    failures = [finding for finding in findings if finding.verdict is Verdict.FAILED]
    if failures:
        raise typer.Exit(failures[0].exit_code)


def _show(finding: Finding) -> None:
    rest = finding.detail + (f"\n-> {finding.remedy}" if finding.remedy else "")
    show_facts([(f"{finding.check:<12}{finding.verdict.value:<8}", rest)])
