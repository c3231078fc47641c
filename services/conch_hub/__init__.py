"""Language models from elsewhere: `conch pull` fetches one, `conch run` opens a chat with one."""
