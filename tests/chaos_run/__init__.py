"""The chaos run: real torchrun jobs on a real service, Postgres and SeaweedFS, and everything that fails, fails.

    make chaos MINUTES=10 [AGENTS=yes]    or: .venv/bin/python -m tests.chaos_run --minutes 10 [--seed N] [--agents]

trainer.py    what torchrun starts: ranks that train a small model, and journal every step with a digest of the state
journal.py    what each rank has done, a line for each thing before the next one begins
clock.py      the wall clock of a process jumps; serve.py is the service with such a clock
place.py      the servers, and proxies in front of them: everything that a job needs and that may fail
nodes.py      with --agents: each rank is on a node of its own, whose agent takes its saves and copies those of another
job.py        one training run under a launcher that starts the same command again, as a cluster does
faults/       what can happen, a kind each: how it is done, and how it ends
chaos.py      faults at random moments, each until every job has trained and committed beyond it
resized.py    the same run on one rank and on two again: what is restored is what was saved
findings.py   what must not be, and what was counted
judge.py      by the journals: the bits, where each launch went on, why each ended
accounts.py   by what REST says of the attempts: ends, steps, lost steps, goodput
catalog.py    by the catalog: what was committed is there; readback.py restores all of it in a process of its own
run.py        all of it together; table.py is what a person sees

A fault's random moment and choice come from the seed, which is printed: the processes around it are not repeatable, so
a run that fails keeps its folder with journals and logs.
"""
