"""Background work: every room's controllers, and the threads that run them.

registry.py     all controllers and kinds of operations; a thread for each
reconcile.py    one pass: whether it begins, and what is noted of it
controllers.py  what people see and say of them: list, pause, resume, run now
"""
