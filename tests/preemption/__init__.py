"""SIGTERM at a random moment, many times, on two ranks against a real service: is the newest state there afterwards?

    make preempt TIMES=100 [AGENTS=yes]   or: .venv/bin/python -m tests.preemption --times 100 [--seed N] [--agents]

plan.py       what a launch is like: its steps, its saves, its store, its deadline, and when it is told to leave
job.py        one rank of a launch: trains, evaluates, and writes down each step
launch.py     two such ranks, forked from a process that has torch imported; the signal, and SIGKILL at the deadline
node.py       the same two ranks as the command of a `holdfast launch --agent`
judge.py      what the catalog has against what the ranks wrote down
many.py       launches of one run, one after the other, each resuming the one before; the printed table

It must not depend on luck: whatever it finds is told with the seed of that launch.
"""
