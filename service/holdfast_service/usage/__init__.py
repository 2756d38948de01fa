"""What checkpoints take up, what that costs, and what it would cost under another policy."""
