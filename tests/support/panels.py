"""The panels of deploy/grafana that ask Prometheus, and what Grafana makes of their queries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from scripts import write_dashboards

DASHBOARDS = {each["name"]: each for each in write_dashboards.definitions()}


@dataclass(frozen=True)
class Query:
    """One line of a panel, or its only one."""

    dashboard: str
    panel: str
    legend: str
    text: str

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel} {self.legend}".strip()


QUERIES = [
    Query(name, panel["title"], legend, text)
    for name, dashboard in DASHBOARDS.items()
    for panel in write_dashboards.panels_of(dashboard)
    for legend, text in write_dashboards.queries_of(panel).items()
]


def asked(query: str, chosen: Mapping[str, str] = MappingProxyType({})) -> str:
    """As Grafana asks it when everything is chosen, or one project and run."""
    values = re.sub(r"\$(project|run|store)\b", lambda found: chosen.get(found[1], ".*"), query)
    return values.replace("$__rate_interval", "1m")


def gpus_of(host: str) -> str:
    """As dcgm-exporter writes it, of a host that the jobs say they are on."""
    return f"""# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="GPU-1",device="nvidia0",Hostname="{host}"}} 0
"""
