"""What the history of a run tells: goodput, how often to save, what a policy would cost."""
