"""Sample objects, by which a client shows that it reaches the store. No table knows them."""
