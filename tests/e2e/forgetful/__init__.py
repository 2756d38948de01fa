"""A small training job that resumes exactly, and copies of it that each forget one thing: `python job.py THING`.

Each is what somebody would write. `nothing` is the control.
"""
