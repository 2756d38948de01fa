"""Who has fallen silent: attempts that stand still, attempts that are lost, uploads that nobody goes on with."""
