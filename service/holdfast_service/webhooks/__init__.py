"""Webhooks: people of a project make them, what happens leaves calls (`catalog/webhook_outbox.py`), and these are made.

endpoints.py   the routes: create.py, look.py, remove.py, try_out.py
tick.py        the controller: which calls are due, and what became of each; retries.py: when again
call.py        one call; target.py: where to, and where never; signing.py: what proves that it is ours
"""
