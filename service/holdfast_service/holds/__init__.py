"""Holds on checkpoints (protocol rule 29), and their mirror in the store's Object Lock.

place.py, extend.py, release.py   what people do
list_holds.py, view.py            what they see
mirror.py                         a controller: tells the stores which copies are held
locks.py                          which copies are to be locked or unlocked (queries)
"""
