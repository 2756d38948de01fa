"""What lies beside the data, so that a catalog can be rebuilt from the bucket alone (protocol rule 30)."""
