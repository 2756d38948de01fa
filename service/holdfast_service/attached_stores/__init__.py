"""The stores that this service has attached.

attached.py   a store that is opened: what it is for, whether it answers; how a client proves that it sees its mount
ownership.py  whose a store is; epoch.py: claiming it after the catalog was restored or cloned
samples.py    how a client tries a store, for `holdfast doctor`
metrics.py    which stores cannot be used, for Prometheus
"""
