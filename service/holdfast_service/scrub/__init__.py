"""What the copies are worth: prove what nobody has hashed, scrub what was proven long ago, heal what is bad.

prove.py            a round: reads copies that are unproven or suspect
rescrub.py          a round: reads each copy again, the longest unread first, a share each day
heal.py             a round: another copy for what is bad, and takes the marks away from what is whole again
read_copies.py      what they share: claim, read back, settle, store by store; tally.py: what came of it
verify.py           the cheap look: sizes and checksums that the store reports
mend_chunk.py       one bad copy: a new one from another copy, read before it counts
start_scrub.py      on demand, for a run or a checkpoint: the call
run_scrub.py        the operation that it starts; scrub_chunks.py: a portion of it
impact.py           what a bad chunk means: copies, checkpoints, runs and the nearest good steps
bad_copies.py       everything that is bad or suspect in a project
endpoints.py        the routes; numbers.py: what /metrics tells
"""
