"""What a project may have at most: bytes and objects of the primary store, runs, checkpoints (docs/adr/0071).

limits.py      what counts, and the refusal of what would exceed a hard quota, under the project's lock
crossings.py   tells once that a quota is near, reached, or relieved
"""
