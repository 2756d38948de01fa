"""Copies in a second store: a project's policy says of what, and a controller brings them there, newest first.

policy.py           what a policy asks for: one row per checkpoint and store
copy_checkpoint.py  which chunks a store lacks, and how they get there, under leases
controller.py       one pass
lag.py              how far behind it is, for people
drill.py            a restore from one store alone, that verifies every byte
"""
