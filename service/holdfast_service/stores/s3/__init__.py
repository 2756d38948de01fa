"""Chunks in a bucket of S3, or of what speaks like it."""
