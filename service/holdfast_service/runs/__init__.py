"""Projects, runs and their checkpoints, as people and programs look at them.

views.py             from names to rows, and from rows to what the wire shows
list_checkpoints.py  lists and edits checkpoints; list_runs.py: runs; projects.py: projects and their quota
metrics.py           what the catalog holds, for Prometheus
"""
