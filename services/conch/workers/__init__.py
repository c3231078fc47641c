"""Python models in worker processes: a crash, a leak or a blocked interpreter harms one instance alone.

`python_backend` chooses between instances in process and in workers. `protocol` is what both ends of a
worker's socket share; `connection` is the server's side of one worker's socket;
`supervision` starts, watches and restarts processes; `host` runs inside the worker; `environments` finds
the interpreter and packages that a model asks for.
"""
