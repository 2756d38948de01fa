"""Attempts: open one (which fences every older one), say that it is alive, say what it resumed from, end it.

endpoints.py       the routes
open.py            compare-and-swap, the fence, then the restore point
crash_loop.py      what the last attempts all crashed from; quarantine.py: it is not offered again
find_or_make.py    project and run of the name, made where that is wanted; similar_names.py: and where it is a typo
resumed_from.py    what the ranks have really loaded; heartbeat.py, end.py, read.py
"""
