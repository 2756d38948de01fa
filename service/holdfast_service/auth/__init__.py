"""Who is calling, and what the token may do. Default-deny: a route without `require(scope)` fails a test."""
