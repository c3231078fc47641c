"""Reads YAML files of Triton's Model Analyzer as flags of `conch tune`.

A key that has no counterpart is refused: each says how a search goes or where its files are, and would be
without effect here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_METRICS = {
    "perf_throughput": "throughput",
    "perf_latency_p90": "p90",
    "perf_latency_p95": "p95",
    "perf_latency_p99": "p99",
    "cpu_used_ram": "memory",
    "gpu_used_memory": "gpu_memory",
}
_UNITS = {"throughput": "", "memory": "MB", "gpu_memory": "MB"}
_INSTANCES = "run_config_search_{}_instance_count"
_BATCHES = "run_config_search_{}_model_batch_size"
_DEFAULT_RANGES = {_INSTANCES: (1, 5), _BATCHES: (1, 128)}
_SAME_PLACE = {
    "--concurrency": ("-c", "--rate"),
    "--rate": ("-c", "--concurrency"),
    "--batch": ("-b",),
    "--output": ("-o",),
}
"""Flags of which each replaces the first one."""


class YamlError(Exception):
    """A file can't be read, or has keys that conch tune does not follow."""


def flags_of(path: Path, model: str) -> tuple[str, list[str]]:
    """The model that a file profiles, and the flags that stand for its keys.

    Args:
        path: The file.
        model: One of its models; may be empty if it has only one.

    Raises:
        YamlError: The file, a value or a key is wrong.
    """
    whole = _load(path)
    models = _models(whole.pop("profile_models", None))
    name = model or next(iter(models), "")
    if len(models) > 1 and not model:
        raise YamlError(f"{path}: profile_models has {', '.join(models)}: name one, as conch tune {name}")
    if not name or (models and name not in models):
        raise YamlError(f"{path}: profile_models has no model '{model}'")
    own = dict(models.get(name) or {})
    parameters = own.pop("parameters", None) or {}
    reader = _Reader({**whole, **own, **_mapping(parameters, "parameters")})
    flags = list(reader.flags())
    if reader.problems or reader.left:
        unknown = f"conch tune does not follow {', '.join(sorted(reader.left))}: remove them"
        raise YamlError(f"{path}: " + "; ".join([*reader.problems, *([unknown] if reader.left else [])]))
    return name, flags


def without_replaced(flags: Sequence[str], given: Sequence[str]) -> list[str]:
    """The flags of a file that none of the command line replaces."""
    return [flag for flag in flags if not _is_replaced(flag.partition("=")[0], given)]


def _is_replaced(name: str, given: Sequence[str]) -> bool:
    names = (name, *_SAME_PLACE.get(name, ()))
    for each in given:
        here = each.partition("=")[0]
        if here in names or (not here.startswith("--") and here[:2] in names):
            return True
    return False


class _Reader:
    """Takes keys one after the other.

    Attributes:
        left: Names of keys that were not taken.
        problems: Errors in values.
    """

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self._keys = dict(keys)
        self.problems: list[str] = []
        self.left: list[str] = []

    def flags(self) -> Iterator[str]:
        """The flags."""
        for key, flag in (("model_repository", "--model-repository"), ("export_path", "--output")):
            if key in self._keys:
                yield f"{flag}={self._keys.pop(key)}"
        for key, flag in (
            ("batch_sizes", "--batch"),
            ("concurrency", "--concurrency"),
            ("request_rate", "--rate"),
        ):
            if key in self._keys:
                yield from self._one(key, flag)
        for key, flag, unit in (
            ("duration_seconds", "--window=", "s"),
            ("latency_budget", "--max=p99=", "ms"),
            ("min_throughput", "--min=throughput=", ""),
        ):
            if key in self._keys:
                yield f"{flag}{self._keys.pop(key)}{unit}"
        yield from self._objectives()
        yield from self._constraints()
        yield from self._ranges()
        yield from self._config_parameters()
        yield from self._load_flags()
        for flag, value in _mapping(
            self._keys.pop("triton_server_flags", None), "triton_server_flags"
        ).items():
            yield f"--serve-flag=--{str(flag).replace('_', '-')}={value}"
        for key in ("bls_composing_models", "ensemble_composing_models"):
            yield from (f"--load-model={name}" for name in _models(self._keys.pop(key, None)))
        self.left += self._keys

    def _one(self, key: str, flag: str) -> Iterator[str]:
        values = self._numbers(key, self._keys.pop(key))
        if len(values) == 1:
            yield f"{flag}={values[0]}"
        elif values:
            listed = ", ".join(map(str, values))
            self.problems.append(f"{key}: conch tune measures with one value; choose one of {listed}")

    def _objectives(self) -> Iterator[str]:
        found = self._keys.pop("objectives", None)
        weights = dict.fromkeys(found, 1) if isinstance(found, list) else _mapping(found, "objectives")
        for metric, weight in weights.items():
            name = self._metric("objectives", str(metric))
            if name:
                yield f"--objective={name}={weight}"

    def _constraints(self) -> Iterator[str]:
        for metric, bounds in _mapping(self._keys.pop("constraints", None), "constraints").items():
            name = self._metric("constraints", str(metric))
            for bound, value in _mapping(bounds, f"constraints.{metric}").items() if name else ():
                yield f"--{bound}={name}={value}{_UNITS.get(name, 'ms')}"

    def _metric(self, key: str, metric: str) -> str:
        if metric not in _METRICS:
            self.left.append(f"{key}.{metric}")
        return _METRICS.get(metric, "")

    def _ranges(self) -> Iterator[str]:
        for key, field in ((_INSTANCES, "instances"), (_BATCHES, "batch")):
            ends = [self._keys.pop(key.format(end), None) for end in ("min", "max")]
            if ends == [None, None]:
                continue
            low, high = (
                int(given or default) for given, default in zip(ends, _DEFAULT_RANGES[key], strict=True)
            )
            values: Sequence[int] = range(low, high + 1)
            if field == "batch":
                values = [1 << power for power in range(high.bit_length()) if low <= 1 << power <= high]
            yield _search(field, values)

    def _config_parameters(self) -> Iterator[str]:
        key = "model_config_parameters"
        given = _mapping(self._keys.pop(key, None), key)
        if "max_batch_size" in given:
            yield _search("batch", self._numbers(f"{key}.max_batch_size", given.pop("max_batch_size")))
        batching = given.pop("dynamic_batching", None)
        batching = _mapping(_alone(batching), f"{key}.dynamic_batching")
        name = "max_queue_delay_microseconds"
        if name in batching:
            yield _search("delay_us", self._numbers(f"{key}.{name}", batching.pop(name)))
        if "preferred_batch_size" in batching:
            # A field that is a list itself has a list of lists.
            given_sizes = batching.pop("preferred_batch_size")
            lists = given_sizes if isinstance(given_sizes, list) else [given_sizes]
            texts = ("/".join(map(str, each if isinstance(each, list) else [each])) for each in lists)
            yield _search("preferred", list(texts))
        groups = given.pop("instance_group", None)
        group = _mapping(_alone(_alone(groups)), f"{key}.instance_group")
        if "count" in group:
            yield _search("instances", self._numbers(f"{key}.instance_group.count", group.pop("count")))
        self.left += [f"{key}.dynamic_batching.{each}" for each in batching]
        self.left += [f"{key}.instance_group.{each}" for each in group]
        self.left += [f"{key}.{each}" for each in given]

    def _load_flags(self) -> Iterator[str]:
        flags = _mapping(self._keys.pop("perf_analyzer_flags", None), "perf_analyzer_flags")
        for key, flag in (("shape", "--shape"), ("input-data", "--data")):
            given = flags.pop(key, [])
            yield from (f"{flag}={each}" for each in (given if isinstance(given, list) else [given]))
        self.left += [f"perf_analyzer_flags.{each}" for each in flags]

    def _numbers(self, key: str, value: Any) -> list[int]:
        """Numbers of ``1,2``, ``[1, 2]`` or ``{start, stop, step}``."""
        try:
            if isinstance(value, Mapping):
                step = int(value.get("step", 1))
                return list(range(int(value["start"]), int(value["stop"]) + 1, step))
            each = (
                value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
            )
            return [int(one) for one in each]
        except (KeyError, TypeError, ValueError):
            self.problems.append(f"{key} takes 1,2 or [1, 2] or {{start: 1, stop: 4, step: 1}}, not {value}")
            return []


def _load(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError:
        raise YamlError("-f needs PyYAML: pip install 'conch[tune]'") from None
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise YamlError(f"{path}: {error}") from None
    return dict(_mapping(found, str(path)))


def _models(found: Any) -> dict[str, Any]:
    """Models with their own keys, of a name, names, or a mapping."""
    if isinstance(found, str):
        return {name.strip(): None for name in found.split(",") if name.strip()}
    if isinstance(found, list):
        return {name: keys for each in found for name, keys in _models(each).items()}
    return dict(_mapping(found, "profile_models"))


def _mapping(found: Any, key: str) -> dict[Any, Any]:
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise YamlError(f"{key} has keys with values, not {found}")
    return dict(found)


def _alone(found: Any) -> Any:
    """The element of a list of one."""
    return found[0] if isinstance(found, list) and len(found) == 1 else found


def _search(field: str, values: Sequence[object]) -> str:
    return f"--search={field}={','.join(map(str, values))}"
