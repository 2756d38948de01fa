"""The local tier in a training job: failed saves, and saves that an earlier attempt left in the spool.

Folder, records and pushing are the client's (holdfast_client.local), because the command line shares them.
"""
