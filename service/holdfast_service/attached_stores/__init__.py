"""The stores that this service has attached: whose they are, whether they answer, how a client tries them."""
