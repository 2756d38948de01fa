"""Moves what is seldom read to colder places, and makes it readable again when a person asks for it.

wanted.py      what the policy wants of each checkpoint of a run. Pure
decide.py      writes that down, run by run
movable.py     of which chunks a hot copy may go (queries)
cool.py        gives the chunks of due checkpoints a copy in the colder place
retire.py      takes the hot copies away, and says of checkpoints that they are cold
thaw.py        keeps what a person wants readable so, until its end
plan.py        what would move when
tick.py        one round
"""
