"""Moves what is seldom read to colder places, and makes it readable again when a person asks for it.

rules.py          what the policy wants of each checkpoint of a run
movable.py        of which chunks a hot copy may go (queries)
cool.py           gives the chunks of due checkpoints a copy in the colder place, and takes the hot ones away
thaw_requests.py  a person wants a cold checkpoint to be readable
thaw.py           asks the store for each cold chunk of it, and keeps it readable until its end
show_plan.py      what would move when
controller.py     one pass
"""
