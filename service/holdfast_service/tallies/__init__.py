"""Sums that are kept beside the rows: what a project holds is read, and not counted (docs/adr/0056).

sums.py        reads them: a tally and the deltas that are not in it yet, in one statement
fold.py        adds the deltas to the tallies
recount.py     finds out what bytes are kept for, where something has changed
compare.py     compares the sums with the rows, in slices; what differs has drifted, and is put right
controller.py  the controller `tally`, which does all three; metrics.py: how it is doing
"""
