"""Looks after attempts that say something other than that all is well: stalled ones, and fenced ones that stay silent.

tick.py       one round
stalled.py    whether a living attempt comes on (pure)
taken_over.py a fenced attempt that never called again was lost before it was fenced
"""
