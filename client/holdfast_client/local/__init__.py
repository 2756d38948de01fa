"""Chunks on this machine's own disk, shared by the processes of one host: cache of a restore, tier below the store.

What is here is never believed by its name: whoever reads hashes.
"""
