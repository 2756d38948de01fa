"""Copies in a second store: a project's policy says of what, and a controller brings them there, newest first.

wanted.py      what a policy asks for (pure)
rows.py        one row per checkpoint and store, judged by the policy of the moment
missing.py     which chunks a store lacks (queries)
copying.py     one checkpoint's missing chunks, under leases
tick.py        one round
show.py        how far behind it is, for people
drill.py       a restore from one store alone, that verifies every byte
"""
