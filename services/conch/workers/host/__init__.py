"""What runs inside a worker; it imports the standard library, numpy, `conch.core` and `conch.backends` only."""
