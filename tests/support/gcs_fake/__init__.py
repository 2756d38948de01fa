"""A strict stand-in for Google Cloud Storage: no emulator checks V4 signatures, so this one does.

process.py       starts and stops it, and makes the accounts, the key file and the buckets
server.py        the process itself: XML and JSON APIs, token server, metadata server, IAM's signBlob
xml_api.py, json_api.py, identity_api.py     what each of them answers
signatures.py    V4 signed URLs, verified with nothing of the service's own signer
accounts.py      who may do what, and access tokens
objects.py       buckets with generations, on disk, so that they outlive the process
replies.py       refusals as Google words them

It refuses whatever it does not know. Codes are Google's: 400 ExpiredToken, 400 MalformedSecurityHeader, 403
SignatureDoesNotMatch, 403 AccessDenied, 400 BadDigest, 412 PreconditionFailed.
Source: https://cloud.google.com/storage/docs/xml-api/reference-status
"""
