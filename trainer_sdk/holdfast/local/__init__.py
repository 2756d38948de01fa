"""The local tier in a training job: what becomes of a save that failed, and what an earlier attempt left in the spool.

Folder, records and pushing are the client's (holdfast_client.local), which the command line shares.
"""
