"""Whether a state is worth going on from, and the way back where it is not.

diverged.py            is the state finite, and what does the user's rule say of it
loss_spike.py          a rule that ships: the loss has left the band that it ran in
missing_components.py  what the run's first checkpoint had and this state lacks
rollback.py            back to the last healthy checkpoint, in a running job
"""
