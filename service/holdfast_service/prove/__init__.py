"""Controllers that find out what the copies are worth: read what nobody has hashed, and unmark what is whole again."""
