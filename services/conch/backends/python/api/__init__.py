"""The API that models import as ``triton_python_backend_utils``; all names are exported by `pb_utils`."""
