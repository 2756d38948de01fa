"""What background work is made of: the report of a round, long operations, the processes."""
