"""What the ranks of a job agree on. The only collectives are here."""
