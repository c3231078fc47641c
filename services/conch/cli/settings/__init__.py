"""Reads the settings of `conch serve` from flags, environment, file and keywords, and presents them."""
