"""What the image is made of: the lock, its bill of materials, the licences, and the wheel."""
