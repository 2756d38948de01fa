"""Whether a job should go on from a state, and the way back if not.

diverged.py    the finite check, and the user's rule
loss_spike.py  a rule that ships: the loss has left its band
rollback.py    back to the last healthy checkpoint, in a running job
"""
