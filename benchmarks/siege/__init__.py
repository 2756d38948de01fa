"""The siege: connections that send half a request, a flood of wrong tokens and one greedy project, all at once, against
a real service on Postgres, while another project saves.

- attack.py: what attacks, a process of its own.
- siege.py: the service, the saving project, and what was counted.
- __main__.py: `make siege`, which measures the rate of saves without and with it.
- tests/chaos/test_siege.py asks whether every save was committed; it looks at no rate.
"""
