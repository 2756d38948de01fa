"""This job's part in its run: the attempt, its heartbeat, and its outcome."""
