"""Reads for people and dashboards: projects, runs, checkpoints, manifests, the service itself. Edits are small ones."""
