"""The node agent: a process that finishes the saves of this node's ranks, also when those ranks are dead.

rank: stages into shared memory -> hands the save over, one message on a Unix socket -> trains on
agent: maps the memory -> hashes, negotiates, uploads, seals, by the same ShardWriter as a rank

messages.py       what the two sides say, as frames
channel.py        the Unix socket: frames with descriptors, and whose process is at the other end
shared_memory.py  sealed memory that both map, and how much of it there may be
held_save.py      one rank's part of a save in the agent: one try for a living rank, all tries for a dead one
memory_tier.py    what stays in that memory after the save, and for whom it makes room
lent_chunks.py    the same as a restore reads it
copies.py         copies of other hosts' parts here, and of this host's parts there
lost_hosts.py     what a lost host had not sent, sealed from the copies here
peer_server.py    where other hosts reach this agent
peer_chunks.py    how a restore, or an agent, reads in the memory of another host's agent
server.py         the agent: connections, its byte budget, its end
rank_link.py      one rank's connection in the agent
process.py        where it listens, and one that a launch has started for its job
metrics.py        what the agent says of itself, for Prometheus
connection.py     a rank's connection: questions in their order, and what the agent says meanwhile
link.py           a rank's side: hands over, follows, and notices within a moment that the agent is gone
"""
