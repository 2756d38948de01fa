"""This job's part in its run: the attempt, its heartbeat, and what is told of it."""
