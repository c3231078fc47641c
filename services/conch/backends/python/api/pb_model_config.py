"""The config object that a model's `auto_complete_config` fills in."""

from __future__ import annotations

import json
import logging
from typing import Any

from conch.backends.python.api.pb_errors import TritonModelException
from conch.backends.python.runtime.tracebacks import describe, model_exc_info
from conch.core.errors import ConchError, InternalError, message_of

log = logging.getLogger(__name__)

_SETTABLE = ("max_batch_size", "input", "output", "dynamic_batching", "model_transaction_policy")


class ModelConfig:
    """A model config that a model may complete; conflicts raise `ValueError` with Triton's texts.

    Args:
        model_config: The config as JSON.
    """

    def __init__(self, model_config: str) -> None:
        config: dict[str, Any] = json.loads(model_config)
        config.setdefault("name", "")
        config["max_batch_size"] = int(config.get("max_batch_size") or 0)
        for key in ("input", "output"):
            config.setdefault(key, [])
        self._model_config = config
        self._parameters: dict[str, Any] = {}  # those that the model has set
        self._where = f"auto-complete-config function for model '{config['name']}'"

    def as_dict(self) -> dict[str, Any]:
        """The current config."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Sets the maximum batch size, which must not be below the config's."""
        configured = self._model_config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in {self._where} specified "
                f"max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enables dynamic batching; fails if the config has another scheduler."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but {self._where} tries to "
                    f"set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:
        """Adds an input with keys name, data_type, dims and, optionally, optional."""
        allowed = ("name", "data_type", "dims", "optional")
        self._add("input", input, allowed, "'name', 'data_type', 'dims' and 'optional'")

    def add_output(self, output: dict[str, Any]) -> None:
        """Adds an output with the keys name, data_type and dims."""
        self._add("output", output, ("name", "data_type", "dims"), "'name', 'data_type' and 'dims'")

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Sets the decoupled property; fails if the config contradicts."""
        if any(key != "decoupled" for key in transaction_policy_dict):
            raise ValueError(
                f"model transaction property in {self._where} contains property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" in transaction_policy_dict:
            wanted = transaction_policy_dict["decoupled"]
            if policy.setdefault("decoupled", wanted) != wanted:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model "
                    f"'{self._model_config['name']}', which is already set to '{policy['decoupled']}'."
                )

    def set_parameter(self, key: str, value: str) -> None:
        """Sets a parameter of the model, which must not contradict the config's; not in Triton."""
        configured = self._model_config.get("parameters", {}).get(key, {}).get("string_value", value)
        if configured != value:
            raise ValueError(
                f"configuration specified parameter '{key}' as '{configured}', but {self._where} specified "
                f"'{value}'"
            )
        self._parameters[key] = {"string_value": value}

    def _add(self, kind: str, tensor: dict[str, Any], allowed: tuple[str, ...], allowed_text: str) -> None:
        label = f"{kind} '{tensor['name']}'" if "name" in tensor else kind
        if any(key not in allowed for key in tensor):
            raise ValueError(f"{label} in {self._where} contains property other than {allowed_text}.")
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{label} in {self._where} is missing '{key}' property.")
        tensors: list[dict[str, Any]] = self._model_config[kind]
        for current in tensors:
            if current.get("name") == tensor["name"]:
                self._merge(kind, current, tensor)
                return
        tensors.append(tensor)

    def _merge(self, kind: str, current: dict[str, Any], tensor: dict[str, Any]) -> None:
        """Merges a tensor from the model into the config's entry."""
        model, name = self._model_config["name"], tensor["name"]
        datatype = current.get("data_type", "TYPE_INVALID")
        if datatype not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {datatype} for {kind} "
                f"'{name}', model provides {tensor['data_type']}"
            )
        wanted, dims = list(tensor["dims"]), [int(dim) for dim in current.get("dims", ())]
        if dims and dims != wanted:
            raise ValueError(
                f"model '{model}', tensor '{name}': the model expects dims {wanted} but the model "
                f"configuration specifies dims {dims}"
            )
        if "optional" in tensor and current.get("optional", tensor["optional"]) != tensor["optional"]:
            raise ValueError(
                f"model '{model}', tensor '{name}': the model expects optional {tensor['optional']} but the "
                f"model configuration specifies optional {current['optional']}"
            )
        current.update(tensor)


def auto_complete(model_class: type[Any], config: dict[str, Any]) -> dict[str, Any]:
    """Lets a model complete its config.

    Raises:
        ConchError: The model contradicts the config, or failed.
    """
    function = getattr(model_class, "auto_complete_config", None)
    if function is None:
        return config
    try:
        completed = function(ModelConfig(json.dumps(config)))
        if not isinstance(completed, ModelConfig):
            raise TritonModelException(
                f"auto_complete_config function in model '{config.get('name', '')}' must return a valid "
                f"pb.ModelConfig object."
            )
        # Through JSON, as in Triton: values that JSON cannot carry fail here.
        result: dict[str, Any] = json.loads(json.dumps(completed.as_dict()))
    except ConchError:
        raise
    except TritonModelException as error:
        raise InternalError(message_of(error)) from error
    except BaseException as error:  # boundary: the model's code, which may raise anything
        name = config.get("name", "")
        log.error("auto_complete_config of model '%s' failed", name, exc_info=model_exc_info(error))
        raise InternalError(describe(error)) from error
    config.update({key: result[key] for key in _SETTABLE if key in result})
    if completed._parameters:
        config["parameters"] = {**config.get("parameters", {}), **completed._parameters}
    return config
