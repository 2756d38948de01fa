"""What happens to runs, checkpoints and stores, told to those who list events, follow them, or have webhooks called."""
