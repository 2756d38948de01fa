"""What the copies are worth: verify what only clients have hashed, scrub what was verified long ago, repair the bad.

verify.py       a pass: reads copies that are unproven or suspect
controller.py   a pass: reads each copy again, the longest unread first, a share each day
repair.py       a pass: another copy for what is bad, read before it counts; takes the flags from what is whole again
read_copies.py  what they share: claim, read back, settle, store by store
on_demand.py    `holdfast scrubs start`, for a run or a checkpoint
impact.py       what a bad chunk means: copies, checkpoints, runs and the nearest good steps
"""
