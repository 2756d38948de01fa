"""Who is calling, and what the token may do. Default-deny: a route without `require(scope)` fails a test.

principal.py    from a token's text to the caller of a route, and what it may do
credentials.py  the text of a token, a code or a session; how a call brings it; when a token was last used
tokens.py       making, listing, replacing and revoking tokens; bootstrap.py: the first one
"""
