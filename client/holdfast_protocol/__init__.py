"""The wire contract of Holdfast: models, states and problem codes. No I/O, no torch, no database.

Both sides import this package and no module of each other. One module per subject; start at `checkpoints`, for the
commit protocol and the reads of a restore.
"""
