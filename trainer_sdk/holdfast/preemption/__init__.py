"""The machine is about to be taken away: notice it, save in time, leave with a word. All ranks after the same step.

signals.py, clouds/   what comes from outside becomes a Notice
watch.py              takes notices, hands them to the agreement (distributed/step_agreement.py), and minds the deadline
emergency.py          on the training thread, at the agreed step: which state can still be finished, and saving it
estimate.py           that choice; pure
standby_snapshot.py    `stage_every=`: what is staged already, for when no step ends in time
"""
