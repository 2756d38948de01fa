"""What background work is made of: the report of a pass, long operations, the processes."""
