"""Real servers for the tests. Each starter is a context manager, so that fixtures and the demo share them."""
