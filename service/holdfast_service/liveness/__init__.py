"""Attempts that have fallen silent.

abandoned_uploads.py  the pass `reap`: uploads that no rank goes on with are given up; lost attempts are noted
stalled_attempts.py   the pass `liveness`: attempts that live and stand still
lost_attempts.py      attempts that fell silent, while they were the newest and after they were fenced
controller.py         the controllers of this room
"""
