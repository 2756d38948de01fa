"""A strict stand-in for S3 with its archive classes, which no server in the tests' reach has.

server.py       one port of this process, in threads; its clock for archives is moved by the test
signatures.py   SigV4 in headers and in URLs, verified with nothing of the service's own signer
objects.py      what a bucket holds, and what its storage classes let through
replies.py      refusals as Amazon words them

It refuses whatever it does not know: methods, query parameters, `x-amz-` headers, storage classes. Codes are Amazon's:
403 InvalidObjectState for a GET of what is archived, 403 ObjectNotInActiveTierError for a copy from it, 202 for a
restore, 200 for prolonging one, 409 RestoreAlreadyInProgress, 403 SignatureDoesNotMatch, 400 BadDigest.
Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_RestoreObject.html
"""
