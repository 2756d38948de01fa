"""`make scale`: what a checkpoint of many ranks costs the control plane, and what many checkpoints do to each call.
Writes benchmarks/results/scale.json and its plot.

ranks.py     some ranks of a storm, in a process of their own: begin, offer, send, seal
lock_waits.py  how long statements waited for each other's locks
storm.py     all ranks of one checkpoint at once, and what service and database used for it
catalog.py   the rows of a million checkpoints, made by Postgres itself
calls.py     how long each call takes on such a catalog, a job's and an operator's
plot.py      scale.json as a picture
__main__.py  storms of several sizes, several processes, catalogs of several sizes; scale.json and the lines

A rank is a real client with connections of its own; eight of them are a host, and make their calls together. A shard
has two chunks of a few hundred bytes, for the service never sees bytes: more of them would measure the store. Service,
database and ranks share this machine's cores.
"""
