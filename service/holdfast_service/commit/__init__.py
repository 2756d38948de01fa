"""Begin a checkpoint, seal its shards, commit or abort it, and wait for the outcome.

endpoints.py  the routes
begin.py      any rank begins; idempotent. late.py: what was spooled and comes late
seal.py       a rank's share is complete; the one that completes the world commits (complete.py)
fail.py       a rank's share failed; abort.py: the job gives a checkpoint up
read.py       one checkpoint, now; notifier.py: later
"""
