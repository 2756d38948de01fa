"""Projects, runs and their checkpoints, as people and programs look at them."""
