"""What `holdfast doctor` asks of the stores: a sample object there and back, which no table knows, and their clocks."""
