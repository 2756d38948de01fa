"""The machine is about to be taken away: notice it, save in time, report it. All ranks leave after the same step.

signals.py, clouds/    signals and cloud events become a Notice
watch.py               takes notices, passes them to the agreement (distributed/step_agreement.py), minds the deadline
emergency.py           on the training thread, at the agreed step: which state can still be finished, and saving it
estimate.py            that choice; pure
standby_snapshot.py    `stage_every=`: a state that is staged already, in case no step ends in time
"""
