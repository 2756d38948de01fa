"""What lies beside the data, so that a catalog can be rebuilt from the bucket alone (rule record-outbox)."""
