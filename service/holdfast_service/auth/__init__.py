"""Who is calling, and what the token may do. Default-deny: a route without `require(scope)` fails a test.

principal.py  from a token's text to the caller of a route, and what it may do
tokens.py     making, listing, replacing and revoking tokens; bootstrap.py: the first one
last_use.py   when each was last used
"""
