"""Gives up what nobody works on any more: checkpoints whose ranks have fallen silent, attempts that are lost.

tick.py       one round
downtime.py   leaves out the time in which the service itself was away
reasons.py    the sentences that say why (pure)
"""
