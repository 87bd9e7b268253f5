"""What is said to each kind of server."""
