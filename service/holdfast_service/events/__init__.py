"""What happens to runs and checkpoints, told to those who list events, follow them, or have webhooks called."""
