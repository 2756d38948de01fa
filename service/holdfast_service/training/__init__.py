"""Every write of a training job.

attempts.py        opens an attempt, which fences every older one; what it says while it lives and when it ends
mistyped_names.py  whether the name of a new run is a slip for that of another one
crash_loop.py      quarantines a checkpoint from which the last launches have all crashed
fencing.py         what every write passes first; a rank's shard as a row
begin.py           begins a checkpoint, also a late one from a spool
negotiate.py       what each offered chunk needs: there, to be sent with a ticket, or only asked for
seal.py            a rank says that its share is complete: checked, verified with the store, its chunk list written
commit.py          the transaction of a seal; the last one commits the checkpoint
abort.py           a checkpoint is given up, with a reason and a cause
"""
