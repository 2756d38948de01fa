"""How much of a run's time went into steps that it still has, and how the runs of each project fare.

endpoints.py  the route
read.py       one run
numbers.py    for /metrics: runs by status, goodput, how attempts ended
"""
