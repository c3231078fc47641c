"""The backend ``python``: runs models written for Triton's Python backend, in process or in worker processes.

`python_backend` is the backend; `api` is what models import as ``triton_python_backend_utils``; `runtime`
loads and executes a model; `calls` makes requests to other models (BLS).
"""
