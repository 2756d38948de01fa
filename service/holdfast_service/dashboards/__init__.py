"""Views for dashboards: SQL that Metabase, Superset and psql read, documented column by column (docs/adr/0063).

definition.py    what a view and a column are, and the words in which SQLite and Postgres differ
catalog.py       projects, runs, attempts, checkpoints, restore points, events
goodput.py       where the time of attempts and days went
usage_by_day.py  what was committed and removed on a day, and what was kept at its end
samples.py       the hourly samples
curves.py        what jobs measured at their steps
views.py         all of them; the migrations take them away first and make them last
role.py          `holdfast admin dashboard-role`: a role of Postgres that sees the views, and nothing else
"""
