"""The chat of `conch run`: a conversation with a model, and its terminal."""
