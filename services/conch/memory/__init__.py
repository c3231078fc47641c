"""Memory that clients share with the server: regions, and what requests use of them."""
