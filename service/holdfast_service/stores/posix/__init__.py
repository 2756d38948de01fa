"""Chunks in a folder: the embedded default, and every mounted filesystem."""
