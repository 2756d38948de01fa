"""Policies of any kind: put, show, delete. Which one holds for a run is decided in catalog.policies."""
