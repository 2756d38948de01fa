"""Whether a state is worth going on from, and the way back where it is not.

rule.py        what a rule of the user's own is, the default one, and how rank 0 asks it at each save
loss_spike.py  a rule that ships: the loss has left the band that it ran in
components.py  what the run's first checkpoint had and this state lacks
rollback.py    back to the last healthy checkpoint, in a running job
"""
