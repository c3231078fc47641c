"""conch: a gRPC-first inference server that speaks Triton's protocols.

What programs use of it is imported when it is asked for: `import conch` alone is quick.
"""

from importlib import import_module as _import_module

__version__ = "0.1.0"

# What there is, by the module that has it; `__init__.pyi` says the same to type checkers.
_MODULES = {
    "conch_api.embedded_server": ("Server",),
    "conch_api.function_config": ("DynamicBatcher", "ModelConfig", "QueuePolicy", "Tensor"),
    "conch_api.function_io": ("Request", "Result"),
    "conch_api.model_context": ("ModelContext", "model_context"),
    "conch_api.decorators": (
        "batch",
        "fill_optionals",
        "first_value",
        "group_by_keys",
        "group_by_values",
        "pad_batch",
        "sample",
    ),
    "conch_api.client": ("Client",),
    "conch_api.async_client": ("AsyncClient",),
    "conch.core.model_spans": ("span",),
    "conch.settings.option": ("FlagError",),
    "conch.core.errors": (
        "AlreadyExistsError",
        "CancelledError",
        "ConchError",
        "DeadlineExceededError",
        "InternalError",
        "InvalidArgumentError",
        "NotFoundError",
        "ResourceExhaustedError",
        "UnavailableError",
        "UnsupportedError",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]  # noqa: PLE0604  (they are all texts)


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value: object = getattr(_import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
