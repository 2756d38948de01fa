"""Holds on checkpoints (rule holds-outrank), and their mirror in the store's Object Lock.

held.py        what keeps a checkpoint: asked before anything is taken away
holds.py       what people do, and what they see
controller.py  tells the stores which copies are held
"""
