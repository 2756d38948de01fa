"""The operations of the protocol by resource; `client.Client` is all of them together."""
