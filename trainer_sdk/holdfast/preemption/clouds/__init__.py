"""The cloud's announcements of this machine's end: one poller per node asks the metadata server and gives notice.

start.py (which cloud, if any) -> poller.py (one thread) -> aws.py | gcp.py | azure.py -> metadata_server.py (HTTP)
"""
