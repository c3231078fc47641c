"""The parts of a server that have a life of their own: its ports, and what add-ons bring."""
