"""Policies: what a project, or one run, wishes of a controller."""
