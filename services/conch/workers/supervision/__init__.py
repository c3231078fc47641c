"""Worker processes: started, watched, restarted when they die, and reported when they crash."""
