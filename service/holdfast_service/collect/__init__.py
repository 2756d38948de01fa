"""Garbage collection: bytes in the stores that nothing refers to, and rows that no request needs.

controller.py        one pass of the collector; the controllers of this room
references.py        drops what checkpoints refer to that are over, and leaves their chunks as candidates
scan_copies.py       the full scan of the catalog's copies, a portion in each pass: finds missed candidates
garbage.py           which copies may go, and from which stores (queries)
mark_and_delete.py   the transaction: locks, asks again, marks, drops what is gone; then the bytes go
plan.py              what would go now, and what waits for what: for people
orphans.py           the sweep of a store: objects that no row knows, and when a sweep must stop; its pass
doubtful_orphans.py  orphans that are more likely another's: then a sweep stops
needed_objects.py    objects that no row knows and a checkpoint needs: the sweep takes them back
on_demand.py         passes and sweeps that a person asks for
"""
