"""What stays of a run, and how the rest goes: expire -> trash -> purge. The collector takes the chunks afterwards.

facts.py, rules.py, protect.py, plan.py   pure: what is known of each checkpoint, and keep or expire with every reason
read_facts.py, freed.py                   what the catalog knows of a run; the bytes that would go
show_plan.py, apply.py, tick.py           the plan for people, what they apply of it, and the controller that applies it
trash.py, in_force.py                     committed -> trashed, under the locks of run and checkpoints; what forbids it
prune.py, undelete.py, pin.py, result.py  what people do by themselves, and what they are told
purge.py, pressure.py                     trashed -> deleting -> deleted, and when room is so short that it is early
"""
