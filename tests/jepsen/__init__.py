"""The Jepsen trial: jobs save while all that they stand on fails, and a model keeps what they were told is committed.

    make jepsen MINUTES=10 [AGENTS=yes]   or: .venv/bin/python -m tests.jepsen --minutes 10 [--seed N] [--agents]

content.py    what a shard consists of: its bytes say who saved them, of which launch, at which step
journal.py    what was asked for and acknowledged, on disk before anybody goes on: the model is made of it
job.py        a training job: opens an attempt, restores, saves at the steps that are due, and does not stop when
              fenced; it saves by itself, or by the agent of its node (tests/soak/agent_rank.py)
runner.py     one run under a launcher: started again whenever it ends, paused, or launched twice at once
database.py   a Postgres with an older copy of itself, or an asynchronous standby, that it fails over to
place.py      two services, a worker, two stores, the proxies between them, and the clocks
faults.py     what can happen, a kind each
failover.py   the database goes back; and what an operator does then, as docs/operating/disaster.md says
keeper.py     people who prune, take back, collect, sweep and scrub meanwhile
model.py      what must still be there, by the journal alone
judge.py      what is there: the catalog, every byte, and what has leaked; and what came of the two together
trial.py      all of it together; table.py is what a person sees

What a trial can find is of four kinds. Lost: a commit that a job was told of cannot be restored, and nobody asked for
that or said so first. Mixed: shards of two launches in one checkpoint. Wrong: other bytes than the job saved. Leaked:
what nothing refers to and nothing takes away. A fault's moment and choice come from the seed, which is printed; the
processes around it are not repeatable, so a trial that fails keeps its folder.
"""
