"""The copies of chunks in the stores: which can be relied on, how one is read back, moved and found lost."""
