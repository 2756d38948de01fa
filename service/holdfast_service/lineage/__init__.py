"""Which checkpoints led to where a run is now, and which of them can be restored.

lineage.py         the line through a run's attempts, the ranking by a metric, what is proven on it
restore_choice.py  the restore point, and why newer checkpoints were skipped
"""
