"""`make bench`: what a save and a restore cost, beside what a PyTorch user would otherwise pick.

    run.py -> schedule.py (what is measured, in which order) -> servers.py (fresh ones for each subject)
           -> processes.py -> case.py, in a process of its own -> cases/*.py (one subject each)
           -> rows.py (figures, pure) -> report.py (latest.json or partial.json, the table) -> plot.py

The cases of Holdfast run in .venv, those of its peers in .venv-bench; what both use is standard library and torch only.
"""
