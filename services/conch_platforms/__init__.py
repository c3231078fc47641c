"""Routes of hosting platforms, in front of the table of REST routes."""
