"""The frame around every request: its id, the protocol's version, the access log, and errors as problem+json."""
