"""Long work that a person started: looked at, cancelled, and carried out under a lease.

tick.py       one round of the controller: claims, runs the handler, settles
claim.py      which operation is next, and whose it is
settle.py     how a try ended
list_operations.py, cancel.py   what people do with them
"""
