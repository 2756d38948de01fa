"""Identities of other issuers: who they are, what the reviewed file gives them, and the token that they get for it."""
