"""`make scale`: what a checkpoint of many ranks costs the control plane. Writes benchmarks/results/scale.json.

ranks.py     some ranks of a storm, in a process of their own: begin, offer, send, seal
lock_waits.py  how long statements waited for each other's locks
storm.py     all ranks of one checkpoint at once, and what service and database used for it
__main__.py  storms of several sizes, medians, scale.json and the table

A rank is a real client with connections of its own. Its shard has two chunks of a few hundred bytes, for the service
never sees bytes: more of them would measure the store. Service, database and ranks share this machine's cores.
"""
