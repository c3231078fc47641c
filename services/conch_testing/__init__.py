"""Models in tests without a server; programs import it as `conch.testing`."""
