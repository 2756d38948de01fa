"""Commit records beside the data: the outbox that keeps them as new as the catalog (protocol rule 30).

due.py    which projects, runs and checkpoints have a record that is older than they are
tick.py   one round: claims, writes, settles
"""
