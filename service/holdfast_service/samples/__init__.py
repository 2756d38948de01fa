"""What projects and live runs were, hour by hour: bytes, cost, goodput, the age of the restore point (docs/adr/0066).

take.py        one sample of each, from sums that are kept anyway
list.py        samples of a time, by hour or by day, with the hours that are missing
controller.py  the controller `samples`: takes those of the last hour, and forgets old ones
"""
