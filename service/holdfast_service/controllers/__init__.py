"""Controllers as people and processes see them: one row for each in the catalog, over all processes.

begin.py       whether a round may begin here and now: paused, asked for, under a lease
round.py       carries one out, and notes what it did
note.py        writes that down
presence.py    says that this process is alive, and keeps its leases
find.py        from a name to a controller
control.py     pause, resume, run now
look.py        for people: how each one is doing; numbers.py says the same to /metrics
list_workers.py  the processes
"""
