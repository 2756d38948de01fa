"""A save: captured and staged on the training thread, hashed, uploaded, sealed and committed behind it."""
