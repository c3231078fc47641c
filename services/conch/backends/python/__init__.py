"""The code of the backend ``python``, which runs in the server's process and in worker processes.

`api` is what models import as ``triton_python_backend_utils``; `runtime` loads and executes a model; `calls`
makes requests to other models (BLS). The backend itself is `conch.workers.python_backend`.
"""
