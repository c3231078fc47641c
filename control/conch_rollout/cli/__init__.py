"""The command `conch rollout`: calls of the control port, and reports for operators."""
