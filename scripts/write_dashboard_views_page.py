"""Write docs/reference/dashboard-views.md from the views' definitions, so that the page cannot say anything else.

Run it with `make docs`; tests/architecture/test_dashboard_views_page.py fails while the page is not current.
"""

from __future__ import annotations

from pathlib import Path

from holdfast_service.dashboards.definition import PREFIX, View
from holdfast_service.dashboards.views import all_views

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "dashboard-views.md"

_HEAD = f"""# Views for dashboards

SQL views over the catalog, to read from Metabase, Superset, Grafana or psql. How to let a tool see them is in
[dashboards](../operating/dashboards.md). This page is made by `make docs` from
`service/holdfast_service/dashboards/`; edit the descriptions there.

- The views are read-only. Names begin with `{PREFIX}`: what has this version keeps its names, types and meanings,
  and new columns are added at the end. What is to mean something else becomes a view of the next version beside it.
- They show what the catalog knows at the moment of the query. Words, ids and digests (hex) are those that REST shows.
- Postgres has `COMMENT`s of the same text on every view and column, which most tools show.
- Times are in UTC. A day is a day in UTC.
- Purged projects and runs are in none of them, except among the events. Those in the trash have a `deleted_at`.

| type here | Postgres | SQLite |
| --- | --- | --- |
| text | `text` | text |
| integer | `bigint` | integer |
| number | `double precision` | real |
| yes or no | `boolean` | 0 or 1 |
| time | `timestamp with time zone` | text, `YYYY-MM-DD HH:MM:SS.ffffff`, UTC |
| day | `date` | text, `YYYY-MM-DD` |
| JSON | `jsonb` | text |
"""
_TYPES = {
    "TEXT": "text",
    "INTEGER": "integer",
    "NUMBER": "number",
    "BOOLEAN": "yes or no",
    "MOMENT": "time",
    "DAY": "day",
    "DOCUMENT": "JSON",
}


def page() -> str:
    return "\n".join([_HEAD, *(_section(view) for view in all_views())])


def _section(view: View) -> str:
    rows = [
        f"| `{each.name}` | {_TYPES[each.kind.name]} | {each.unit} | {each.meaning.replace('|', chr(92) + '|')} |"
        for each in view.columns
    ]
    head = ["| column | type | unit | what it is |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## {view.name}", "", f"A row is: {view.row[0].lower()}{view.row[1:]}", "", *head, *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
