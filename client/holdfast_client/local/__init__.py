"""Chunks on this machine's own disk, shared by the processes of one host: cache of a restore, tier below the store.

A file's name proves nothing here: every reader hashes.
"""
