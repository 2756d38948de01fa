"""Where chunks live. The one part of the service that touches a bucket or a folder.

base.py        the contract that every store keeps, and the errors that it raises
registry.py    store URL -> store
posix.py       a folder, local or mounted; incoming.py: how a file gets in; mount_proof.py: who sees the same mount
signed_urls.py, endpoints.py    HTTP for those who do not see the mount
s3.py          a bucket; sigv4.py, credentials.py, s3_wire.py: how requests are signed and sent
s3_probe.py, posix_probe.py     what a store really enforces
"""
