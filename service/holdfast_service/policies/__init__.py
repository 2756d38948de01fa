"""Policies of any kind: put, show, delete, and which one holds for a run."""
