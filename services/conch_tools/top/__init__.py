"""`conch top`: what a server does now, from its metrics."""
