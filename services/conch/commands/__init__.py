"""The commands of ``conch`` that speak to a running server."""
