"""Garbage collection: bytes in the stores that nothing refers to, and rows that nobody will ask for.

tick.py         one round
references.py   drops what checkpoints refer to that are over, and leaves their chunks as candidates
look.py         the full look, a portion in each round: finds what nobody left
garbage.py      which copies may go (queries)
mark.py         the transaction: locks, asks again, marks, drops what is gone
delete.py       deletes the bytes of marked copies, settles
ready.py        from which stores anything may be deleted now
plan.py         what would go now, and what waits for what: for people
sweep.py        objects that no row knows; breaker.py: when a sweep must stop (pure); listing.py: what is there
"""
