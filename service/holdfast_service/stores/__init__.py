"""Where chunks live. The one part of the service that touches a bucket or a folder.

base.py      the contract that every store keeps, the errors that it raises, and the tickets of one call
registry.py  store URL -> store
retry.py     the one retry of calls to a store
posix/       a folder, local or mounted, and HTTP for those who do not see the mount
s3/          a bucket of S3
gcs/         a bucket of Google Cloud Storage
azure/       a container of Azure Blob Storage
bucket/      what the buckets have in common

In each bucket's folder: `<kind>_store.py` keeps the contract and has `open_store`, `<kind>_location.py` reads the URL,
`calls.py` has the vendor's library make requests, `signer.py` makes tickets, `probe.py` finds what is really enforced.
A new store is a folder and a line in `registry.py`.
"""
