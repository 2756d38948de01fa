"""Background work: controllers, long operations, and the processes that carry them out."""
