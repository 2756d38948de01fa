"""Writes deploy/grafana/*.json from deploy/grafana/dashboards.yml: part of `make docs`. A test holds them together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "grafana"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_CATALOG_TYPE = "grafana-postgresql-datasource"
_CATALOG = {"type": _CATALOG_TYPE, "uid": "${catalog}"}
_WIDTH = 24
_HEIGHTS = {"stat": 4, "timeseries": 8, "table": 8}


def definitions() -> list[dict[str, Any]]:
    """As dashboards.yml has them."""
    found: list[dict[str, Any]] = yaml.safe_load((FOLDER / "dashboards.yml").read_text(encoding="utf-8"))
    return found


def queries_of(panel: dict[str, Any]) -> dict[str, str]:
    """Prometheus's, by legend; none of a panel that reads the SQL views."""
    if "sql" in panel:
        return {}
    found: dict[str, str] = panel["queries"] if "queries" in panel else {"": panel["query"]}
    return found


def panels_of(definition: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for row in definition["rows"] for panel in row]


def written(definition: dict[str, Any]) -> str:
    """The file's text."""
    dashboard = {
        "uid": f"holdfast-{definition['name']}",
        "title": definition["title"],
        "tags": ["holdfast"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["holdfast"], "title": "Holdfast", "keepTime": True, "includeVars": True}
        ],
        "templating": {"list": list(_variables(definition))},
        "panels": list(_panels(definition["rows"])),
    }
    return json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n"


def _variables(definition: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    if any("sql" in panel for panel in panels_of(definition)):
        yield {"name": "catalog", "label": "Catalog", "type": "datasource", "query": _CATALOG_TYPE}
    chosen = ""
    for name, series in definition["variables"].items():
        query = f"label_values({series}{{{chosen}}}, {name})"
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,  # whenever the time range changes: runs come and go
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        chosen += f'{", " if chosen else ""}{name}=~"${name}"'


def _panels(rows: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for row in rows:
        height = max(_HEIGHTS[panel.get("kind", "timeseries")] for panel in row)
        width = _WIDTH // len(row)
        for column, panel in enumerate(row):
            number += 1
            yield _panel(panel, number, {"x": column * width, "y": top, "w": width, "h": height})
        top += height


def _panel(panel: dict[str, Any], number: int, place: dict[str, int]) -> dict[str, Any]:
    kind = panel.get("kind", "timeseries")
    is_table = kind == "table"
    targets = [
        {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend}
        | ({"format": "table", "instant": True} if is_table else {})
        for place, (legend, query) in enumerate(queries_of(panel).items())
    ]
    if "sql" in panel:
        raw = {"rawSql": panel["sql"].strip(), "rawQuery": True, "editorMode": "code", "format": "time_series"}
        targets = [{"refId": "A", "datasource": _CATALOG} | raw]
    bad_above = panel.get("bad_above")
    defaults: dict[str, Any] = {"unit": panel.get("unit", "short")}
    if bad_above is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": bad_above}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if kind == "timeseries":
        defaults["min"] = 0
        defaults["custom"] = {
            "fillOpacity": 20 if panel.get("stacked") else 0,
            "stacking": {"mode": "normal" if panel.get("stacked") else "none"},
            "thresholdsStyle": {"mode": "off" if bad_above is None else "dashed"},
        }
    made: dict[str, Any] = {
        "id": number,
        "type": kind,
        "title": panel["title"],
        "description": panel.get("told", ""),
        "datasource": _CATALOG if "sql" in panel else _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }
    if "sql" in panel:
        made["timeFrom"] = "30d"  # days are no use in six hours
    if is_table:
        legends = list(queries_of(panel))
        named = {f"Value #{each['refId']}": each["legendFormat"] for each in targets}
        if len(legends) == 1:
            named = {"Value": legends[0]}
        made["transformations"] = [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": named}},
        ]
    return made


def main() -> None:
    for definition in definitions():
        (FOLDER / f"{definition['name']}.json").write_text(written(definition), encoding="utf-8")


if __name__ == "__main__":
    main()
