"""When a step is saved: the policies that a script names (policies.py), what the best so far is (best.py), and the
decision after each step, the same on every rank (schedule.py)."""
