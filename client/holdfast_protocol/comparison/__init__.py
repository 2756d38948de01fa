"""Two checkpoints side by side.

tensors.py    which tensors are equal, told by the digests of their chunks
values.py     how far apart those are that differ: what a worker is asked, and what it answers
"""
