"""`holdfast doctor`: `command` shows, `checks` asks the service, `round_trip` saves and restores a sample."""
