"""Negotiating chunks: which are there already, and an upload ticket for each that is not.

endpoints.py     the routes
negotiate.py     one call of a rank: verify what it has sent, reserve what it will send, hand out tickets
check_offers.py  refuses offers that contradict themselves (pure)
finished.py      uploads that are reported as done
reserve.py       the transaction: chunks, copies, references; decide.py: the decision in it (pure); quota.py
tickets.py       how to send: presigned, or a file on the store's own mount (mount_proofs.py)
"""
