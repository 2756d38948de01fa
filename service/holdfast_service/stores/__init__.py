"""Where chunks live. The one part of the service that touches a bucket or a folder.

base.py        the contract that every store keeps, and the errors that it raises
registry.py    store URL -> store
posix.py       a folder, local or mounted; incoming.py: how a file gets in; mount_proof.py: who sees the same mount
signed_urls.py, endpoints.py    HTTP for those who do not see the mount
s3.py          a bucket; sigv4.py, credentials.py, s3_wire.py: how its requests are signed
gcs.py         a bucket at Google; gcs_signing.py, gcs_signers.py, gcs_credentials.py, gcs_wire.py: the same for it
bucket_wire.py, bucket_location.py, canonical_request.py    what both have in common
make_tickets.py                 one ticket after the other, or several at once where each is signed elsewhere
posix_probe.py, s3_probe.py, gcs_probe.py, presigned_probe.py    what a store really enforces
"""
