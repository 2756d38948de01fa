"""The soak: writers, readers, retention, collection, sweeps, scrubbing and copies at once, with random SIGKILL.

    make soak MINUTES=10 [AGENTS=yes]  or: .venv/bin/python -m tests.soak --minutes 10 [--seed N] [--agents]

content.py    what a shard consists of: bytes that anybody can make again from a few numbers
ledger.py     what each process wrote down: the content of every shard, counts, faults
writer.py     a job: several ranks that save through the real client, fail now and then, and are killed
agent_rank.py such a rank with an agent on its node: the client's own NodeAgent, without the trainer SDK
reader.py     restores checkpoints and compares every byte with the ledger
keeper.py     the operator: policies, prune, undelete, pins, collect, sweep, scrub
fleet.py      service, workers, writers, readers and agents on Postgres and SeaweedFS: started, killed, started again
quiet.py      when nothing is at work any more: what is still on the way, and what has leaked
judge.py      the end: what must hold when everything is quiet
soak.py       all of it together, and the printed table

It must not depend on luck: whatever it finds is told with the seed, and the folder with logs and ledger is kept.
"""
