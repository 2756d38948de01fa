"""`holdfast doctor`: `command` shows, `checks` asks the service, `round_trip` sends a sample to the store and back."""
