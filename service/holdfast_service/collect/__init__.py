"""Garbage collection: bytes in the store that nothing refers to, and rows that nobody will ask for.

tick.py       one round
garbage.py    which copies may go (queries)
delete.py     marks copies, deletes their bytes, settles
forget.py     drops rows of the past: references of finished uploads, lists and chunks without any use
"""
