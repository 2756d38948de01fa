"""Which checkpoints led to where a run is now, and which of them can be restored."""
