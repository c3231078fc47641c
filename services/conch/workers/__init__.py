"""Python models in worker processes: a crash, a leak or a blocked interpreter harms one instance alone.

`protocol` encodes messages and tensors; `connection` is the server's side of one worker's socket;
`supervision` starts, watches and restarts processes; `host` runs inside the worker; `environments` finds
the interpreter and packages that a model asks for.
"""
