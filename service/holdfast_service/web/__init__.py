"""What is around every request.

connections.py    how long a connection may take, how many there are, a strict reading of heads, who calls behind a
                  proxy; certificate.py: TLS of the service itself
frame.py          id, access log, host, protocol version; the way of every call with a token
admission.py      who is worked on, waits or is refused; fair_queue.py: whose turn it is
parameters.py     what routes share; problem_reply.py: errors as problem+json; openapi.py: the document
health.py         `/healthz`, `/readyz`, `/metrics`, and the service's word on itself
"""
