"""The nouns: tables, allowed state transitions (pure) and reads. The verbs meet here and nowhere else."""
