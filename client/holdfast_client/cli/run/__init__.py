"""`holdfast run -- COMMAND`: a job's launcher as a child, and its outcome as an exit code.

command.py -> launcher.py (what the child is told) -> child.py (signals, waiting) -> outcome.py (files, catalog)
-> ending.py (the exit code)
"""
