"""What stays of a run, and how the rest goes: expire -> trash -> purge. The collector takes the chunks afterwards.

plan.py        keep or expire, for each checkpoint, with every reason (pure)
read_facts.py  what the catalog knows of a run
show_plan.py   the plan for people, and the bytes that would go
prune.py       what people apply of a plan, or name themselves
controller.py  applies policies by itself
trash.py       committed -> trashed and back, under the locks of run and checkpoints
pins.py        a person's word that a checkpoint stays
delete.py      whole runs and projects
purge.py       trashed -> deleting -> deleted, and when room is so short that it is early
forget.py      rows that are over
"""
