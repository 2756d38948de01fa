"""Webhooks: people of a project make them, what happens leaves calls (`events/announce.py`), and these are made.

manage.py      what people do with webhooks
controller.py  which calls are due, and what became of each
deliver.py     one call, its signature, and when it is made again
formats.py     what a call says, as its receiver takes it
target.py      where a call may go, and where never
"""
