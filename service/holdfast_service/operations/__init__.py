"""Long work that a person starts.

queue.py            starts one, as a row; one try of it, as its handler sees it
controller.py       claims what is due, runs its handler under a lease, and writes down how it ended
list_operations.py  for people: lists and cancels them

Which handler carries out which kind is in `background/registry.py`: it knows every room.
"""
