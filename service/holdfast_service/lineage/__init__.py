"""Which checkpoints led to where a run is now, and which of them can be restored.

restore_choice.py   the line through a run's attempts, the restore point on it, and why newer checkpoints were skipped
best_and_proven.py  the ranking by a metric, and which checkpoints were read and found good
"""
