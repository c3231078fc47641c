"""Evaluation of the times that the load generator takes: pure, without sockets and clocks."""
