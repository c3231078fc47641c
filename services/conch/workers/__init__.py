"""Processes of their own for instances of models: started, talked to, watched."""
