"""Several servers as one: which models each has, and how changes go from one server to the next."""
