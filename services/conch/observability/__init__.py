"""What the server tells of itself: logs; metrics and traces later."""
