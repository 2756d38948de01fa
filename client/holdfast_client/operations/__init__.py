"""The operations of the protocol, one module per noun; `client.Client` is all of them together."""
