"""What Prometheus reads: this process's requests, and the catalog's own numbers."""
