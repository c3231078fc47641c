"""Converts a version's artifact to the files of a version directory and a config.

The first flavor that an engine of conch serves decides, unless a tag names one; models of other flavors run
by ``mlflow.pyfunc`` in a worker. A file ``config.pbtxt`` in the artifact is the config. Accesses no storage
but by `Artifact.read`.

Without ``--mlflow-allow-code`` a model is data: nothing of it is code, writes files or reaches out
(`conch_control.config.powers`), so no pyfunc, no SavedModel, and of configs in artifacts only what is known
to be harmless.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files as package_files
from typing import Any

from google.protobuf import text_format

from conch.core.errors import ConchError
from conch.protocol.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput
from conch_control.config.parse import decode_config
from conch_control.config.platforms import filling_backend
from conch_control.config.powers import beyond_data, is_code
from conch_control.repository.layout import CONFIG_FILE, split_versions
from conch_mlflow.registry import FLAVOR_TAG
from conch_mlflow.served_files import EXAMPLE_FILE, SIGNATURE_FILE
from conch_mlflow.signature import Signature, SignatureError, Tensor, parse_signature
from conch_stores.stores import StoredObject, is_safe

MLMODEL = "MLmodel"
PYFUNC = "python_function"
_MOST_TEXT = 1 << 20
_BUFFER = 1 << 16
_REQUIREMENTS = "requirements.txt"
_EXAMPLE = "serving_input_example.json"
_OWN = frozenset(
    {
        MLMODEL,
        CONFIG_FILE,
        _REQUIREMENTS,
        "conda.yaml",
        "python_env.yaml",
        "registered_model_meta",
        "input_example.json",
        _EXAMPLE,
    }
)
"""Files of MLflow's own, which an engine does not need."""
_ONNX_OPTIONS = {
    "intra_op_num_threads": "intra_op_thread_count",
    "inter_op_num_threads": "inter_op_thread_count",
}
_SKLEARN_OUTPUTS = {"predict": "predict", "predict_proba": "predict_proba", "decision_function": "margin"}
DATA_ONLY = (
    "and --mlflow-allow-code is off; with it the server runs the code of those who may register models"
)


CHECKED_BACKENDS = frozenset({"pytorch"})
"""Backends whose files may be code, and are looked at here if the config is one that conch writes."""


class FlavorError(ValueError):
    """A version can't be served; the text is a clause."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A version's files.

    Attributes:
        mlmodel: Content of its MLmodel.
        files: Files by path.
        read: Reads bytes of one of them, from a position to another. Raises OSError: it can't be read now.
    """

    mlmodel: Mapping[str, Any]
    files: Mapping[str, StoredObject]
    read: Callable[[StoredObject, int, int], bytes]

    def text(self, path: str) -> str:
        """A small text file. Raises FlavorError: it is missing, too large, or no text."""
        item = self.files.get(path)
        if item is None:
            raise FlavorError(f"its artifact has no '{path}'")
        if item.size > _MOST_TEXT:
            raise FlavorError(f"'{path}' in its artifact is too large")
        try:
            return self.read(item, 0, item.size).decode()
        except UnicodeDecodeError:
            raise FlavorError(f"'{path}' in its artifact is not text") from None

    def below(self, directory: str) -> dict[str, StoredObject]:
        """The files of a directory, by path in it."""
        start = f"{directory}/"
        return {path[len(start) :]: item for path, item in self.files.items() if path.startswith(start)}

    def signature(self) -> Signature | None:
        """The model's signature. Raises FlavorError: it has no counterpart in a config."""
        try:
            return parse_signature(self.mlmodel.get("signature"))
        except SignatureError as error:
            raise FlavorError(f"the {error}, in its signature") from None


@dataclass(frozen=True, slots=True)
class VersionPlan:
    """Files and config that a version is staged from.

    Attributes:
        files: Files by path in the version directory.
        made: Contents of files that conch has made, by path in the version directory.
        shared: Files by path in the model's directory, without the config.
        config: The config file; empty for none.
        generated: True if conch has written the config.
        code: Part of the artifact that runs code, as a clause; empty if not yet known.
        problem: Reason for which it can't be served; a clause.
    """

    files: Mapping[str, StoredObject] = field(default_factory=dict)
    made: Mapping[str, bytes] = field(default_factory=dict)
    shared: Mapping[str, StoredObject] = field(default_factory=dict)
    config: bytes = b""
    generated: bool = False
    code: str = ""
    problem: str = ""


def plan_version(artifact: Artifact, flavor: str, allow_code: bool) -> VersionPlan:
    """Plans a version; `flavor` is that of its tag, empty for none."""
    try:
        plan = _planned(artifact, flavor, allow_code)
        if CONFIG_FILE in artifact.files:
            rest = {path: item for path, item in artifact.files.items() if path not in _OWN}
            config = _served_whole(artifact.text(CONFIG_FILE))
            plan = replace(plan, files={**rest, **plan.files}, config=config, generated=False)
        if not allow_code and (code := plan.code or _code_of(plan)):
            raise FlavorError(f"{code}, {DATA_ONLY}")
        return _with_signature(plan, artifact)
    except FlavorError as error:
        return VersionPlan(problem=str(error))


def _with_signature(plan: VersionPlan, artifact: Artifact) -> VersionPlan:
    """A plan with what scoring and warm-up need; nothing for a model without a signature that they know."""
    try:
        if artifact.signature() is None:
            return plan
    except FlavorError:
        return plan
    made = {**plan.made, SIGNATURE_FILE: json.dumps(artifact.mlmodel["signature"]).encode()}
    example = artifact.files.get(_EXAMPLE)
    files = {**plan.files}
    if example is not None and example.size <= _MOST_TEXT and not any(map(_is_whole_artifact, files)):
        files[EXAMPLE_FILE] = example
    return replace(plan, made=made, files=files)


def _is_whole_artifact(path: str) -> bool:
    """True for the file of a pyfunc's artifact, which runs the example by itself."""
    return path == f"artifact/{MLMODEL}"


def _code_of(plan: VersionPlan) -> str:
    """Part of the artifact or its config that makes it more than data, as a clause; empty for none."""
    for path in (*plan.files, *plan.shared):
        if is_code(path):
            return f"its artifact has code, '{path}'"
    config = decode_config(plan.config, CONFIG_FILE)
    tops = {path.partition("/")[0] for path in plan.files}
    list(filling_backend(config, tops.__contains__))  # the load reports the problems
    found = next(beyond_data(config, CHECKED_BACKENDS if plan.generated else ()), None)
    return "" if found is None else f"it brings {found}"


def _planned(artifact: Artifact, flavor: str, allow_code: bool) -> VersionPlan:
    flavors = artifact.mlmodel.get("flavors")
    if not isinstance(flavors, Mapping) or not flavors:
        raise FlavorError(f"its {MLMODEL} has no flavors")
    names = ", ".join(sorted(map(str, flavors)))
    if flavor and flavor not in flavors:
        raise FlavorError(f"tag {FLAVOR_TAG} is '{flavor}', and it has {names}")
    for name, make in _FLAVORS.items():
        settings = flavors.get(name)
        if isinstance(settings, Mapping) and flavor in ("", name):
            plan = make(artifact, settings)
            if plan is not None:
                return plan
    if PYFUNC not in flavors or flavor not in ("", PYFUNC):
        raise FlavorError(f"no engine serves flavor '{flavor}'" if flavor else f"no engine serves {names}")
    if not allow_code:
        raise FlavorError(f"only Python code of its own can run it (flavor {PYFUNC}), {DATA_ONLY}")
    return _pyfunc(artifact)


def _triton(artifact: Artifact, settings: Mapping[str, Any]) -> VersionPlan:
    directory = _path(settings, "data")
    found = artifact.below(directory)
    if not found:
        raise FlavorError(
            f"flavor triton names the directory '{directory}', which its artifact does not have"
        )
    versions, _ = split_versions({path.partition("/")[0] for path in found if "/" in path})
    if not versions:
        raise FlavorError(f"directory '{directory}' of its artifact has no version directory, such as 1")
    newest = f"{versions[-1]}/"
    numbers = {str(each) for each in versions}
    config = _served_whole(artifact.text(f"{directory}/{CONFIG_FILE}")) if CONFIG_FILE in found else b""
    return VersionPlan(
        {path[len(newest) :]: item for path, item in found.items() if path.startswith(newest)},
        {},
        {
            path: item
            for path, item in found.items()
            if path.partition("/")[0] not in numbers and path != CONFIG_FILE
        },
        config,
    )


def _onnx(artifact: Artifact, settings: Mapping[str, Any]) -> VersionPlan:
    path = _file(artifact, "onnx", settings, "data")
    directory, _, _ = path.rpartition("/")
    # External weights lie beside the model.
    beside = artifact.below(directory) if directory else artifact.files
    files = {
        name: item
        for name, item in beside.items()
        if name not in _OWN and item.path != artifact.files[path].path
    }
    config = _config("onnxruntime")
    options = settings.get("onnx_session_options")
    for name, value in (options if isinstance(options, Mapping) else {}).items():
        if name in _ONNX_OPTIONS:
            config.parameters[_ONNX_OPTIONS[name]].string_value = str(value)
        elif name == "execution_mode":
            config.parameters[name].string_value = "1" if value == "parallel" else "0"
    return _native(config, {**files, "model.onnx": artifact.files[path]})


def _pytorch(artifact: Artifact, settings: Mapping[str, Any]) -> VersionPlan | None:
    directory = _path(settings, "model_data")
    exported = artifact.files.get(f"{directory}/model.pt2")
    config = _config("pytorch")
    if exported is not None:
        config.default_model_filename = "model.pt2"
        compiled = next((name for name in _members(artifact, exported) if _is_compiled(name)), "")
        code = f"its program has compiled code, '{compiled}'" if compiled else ""
        return replace(_native(config, {"model.pt2": exported}), code=code)
    scripted = artifact.files.get(f"{directory}/model.pth")
    signature = artifact.signature()
    if scripted is None or signature is None:
        return None
    # TorchScript has constants; files of `torch.save` are pickles.
    if not any(name.endswith("/constants.pkl") for name in _members(artifact, scripted)):
        return None
    _add_tensors(config, signature)
    return _native(config, {"model.pt": scripted})


def _is_compiled(member: str) -> bool:
    return "aotinductor" in member or is_code(member)


def _members(artifact: Artifact, item: StoredObject) -> list[str]:
    """Names in a zip archive; empty if it is none."""
    try:
        with zipfile.ZipFile(io.BufferedReader(_Ranges(artifact, item), _BUFFER)) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return []


class _Ranges(io.RawIOBase):
    """A file of an artifact, of which only what is read is fetched."""

    def __init__(self, artifact: Artifact, item: StoredObject) -> None:
        self._artifact = artifact
        self._item = item
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._item.size}[whence]
        self._position = max(start + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._item.size)
        if end <= self._position:
            return 0
        data = self._artifact.read(self._item, self._position, end)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _sklearn(artifact: Artifact, settings: Mapping[str, Any]) -> VersionPlan | None:
    path = _file(artifact, "sklearn", settings, "pickled_model")
    if settings.get("serialization_format") != "skops" and not path.endswith(".skops"):
        return None
    config = _config("sklearn")
    flavors = artifact.mlmodel["flavors"]
    pyfunc = flavors.get(PYFUNC)
    wanted = _SKLEARN_OUTPUTS.get(str(pyfunc.get("predict_fn")) if isinstance(pyfunc, Mapping) else "")
    if wanted is not None:
        config.output.add(name=wanted)
    return _native(config, {"model.skops": artifact.files[path]})


def _xgboost(artifact: Artifact, settings: Mapping[str, Any]) -> VersionPlan | None:
    path = _file(artifact, "xgboost", settings, "data")
    name = f"model.{path.rpartition('.')[2]}"
    if name not in ("model.json", "model.ubj", "model.xgb"):
        return None
    config = _config("xgboost")
    config.default_model_filename = name
    return _native(config, {name: artifact.files[path]})


def _lightgbm(artifact: Artifact, settings: Mapping[str, Any]) -> VersionPlan | None:
    path = _file(artifact, "lightgbm", settings, "data")
    if path.endswith((".lgb", ".txt")):
        return _native(_config("lightgbm"), {"model.txt": artifact.files[path]})
    if path.endswith(".skops"):
        return _native(_config("sklearn"), {"model.skops": artifact.files[path]})
    return None


def _tensorflow(artifact: Artifact, settings: Mapping[str, Any]) -> VersionPlan | None:
    for key, more in (("saved_model_dir", ""), ("data", "/model"), ("data", "")):
        if isinstance(settings.get(key), str):
            found = artifact.below(f"{_path(settings, key)}{more}")
            if "saved_model.pb" in found:
                files = {f"model.savedmodel/{path}": item for path, item in found.items()}
                return _native(_config("tensorflow", "tensorflow_savedmodel"), files)
    return None


def _pyfunc(artifact: Artifact) -> VersionPlan:
    signature = artifact.signature()
    if signature is None or not signature.inputs or not signature.outputs:
        raise FlavorError(
            "its signature does not have inputs and outputs; log it with signature=infer_signature(...)"
        )
    names = [each.name for each in (*signature.inputs, *signature.params)]
    if len(set(names)) < len(names):
        raise FlavorError("an input and a param of its signature have one name")
    config = _config("python")
    _add_tensors(config, signature)
    files = {f"artifact/{path}": item for path, item in artifact.files.items()}
    code = package_files("conch_mlflow").joinpath("pyfunc_model.py").read_bytes()
    requirements = artifact.text(_REQUIREMENTS)
    python = _python(artifact)
    if python in ("", f"{sys.version_info[0]}.{sys.version_info[1]}"):
        files[_REQUIREMENTS] = artifact.files[_REQUIREMENTS]
    else:
        code = _script_header(requirements, python).encode() + code
    return VersionPlan(files, {"model.py": code}, {}, _text(config), generated=True)


def _python(artifact: Artifact) -> str:
    """Major and minor version of Python; empty if it is not named."""
    if "python_env.yaml" not in artifact.files:
        return ""
    found = parse_yaml(artifact.text("python_env.yaml"), "python_env.yaml").get("python", "")
    parts = str(found).split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        raise FlavorError(f"python_env.yaml names Python '{found}'")
    return f"{parts[0]}.{parts[1]}"


def _script_header(requirements: str, python: str) -> str:
    """The packages and the Python version, as a comment of PEP 723."""
    lines = [line.strip() for line in requirements.splitlines()]
    packages = [line for line in lines if line and not line.startswith("#")]
    for line in packages:
        if line.startswith("-") or '"' in line or "\\" in line:
            raise FlavorError(
                f"it needs Python {python}, not the server's, and its {_REQUIREMENTS} has the line '{line}', "
                f"which only works with the server's"
            )
    listed = "".join(f'#   "{each}",\n' for each in packages)
    return f'# /// script\n# requires-python = "=={python}.*"\n# dependencies = [\n{listed}# ]\n# ///\n'


def parse_yaml(text: str, name: str) -> Mapping[str, Any]:
    """Reads a YAML mapping without constructing objects. Raises FlavorError: it is none."""
    import yaml

    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FlavorError(f"its {name} is not YAML: {line}") from None
    if not isinstance(found, Mapping):
        raise FlavorError(f"its {name} is no mapping")
    return found


def _config(backend: str, platform: str = "") -> ModelConfig:
    config = ModelConfig(backend=backend, platform=platform)
    config.version_policy.all.SetInParent()  # the registry says which versions are served
    return config


def _native(config: ModelConfig, files: Mapping[str, StoredObject]) -> VersionPlan:
    return VersionPlan(files, {}, {}, _text(config), generated=True)


def _text(config: ModelConfig) -> bytes:
    return text_format.MessageToString(config).encode()


def _served_whole(text: str) -> bytes:
    """A config of an artifact, with the policy of all versions if it has none."""
    try:
        config = decode_config(text.encode(), CONFIG_FILE)
    except ConchError as error:
        raise FlavorError(f"in its artifact, {error.message}") from None
    if config.HasField("version_policy"):
        return text.encode()
    return f"{text.rstrip()}\nversion_policy {{ all {{ }} }}\n".encode()


def _add_tensors(config: ModelConfig, signature: Signature) -> None:
    for each in (*signature.inputs, *signature.params):
        config.input.append(
            ModelInput(name=each.name, data_type=_datatype(each), dims=each.dims, optional=each.optional)
        )
    config.output.extend(
        ModelOutput(name=each.name, data_type=_datatype(each), dims=each.dims) for each in signature.outputs
    )


def _datatype(tensor: Tensor) -> Any:
    return DataType.Value(f"TYPE_{tensor.datatype}")


def _path(settings: Mapping[str, Any], key: str) -> str:
    path = settings.get(key)
    if not isinstance(path, str) or not all(map(is_safe, path.rstrip("/").split("/"))):
        raise FlavorError(
            f"'{key}' of a flavor in its {MLMODEL} is {path!r}, which is no path in the artifact"
        )
    return path.rstrip("/")


def _file(artifact: Artifact, flavor: str, settings: Mapping[str, Any], key: str) -> str:
    path = _path(settings, key)
    if path not in artifact.files:
        raise FlavorError(f"flavor {flavor} names the file '{path}', which its artifact does not have")
    return path


_FLAVORS: Mapping[str, Callable[[Artifact, Mapping[str, Any]], VersionPlan | None]] = {
    "triton": _triton,
    "onnx": _onnx,
    "pytorch": _pytorch,
    "sklearn": _sklearn,
    "xgboost": _xgboost,
    "lightgbm": _lightgbm,
    "tensorflow": _tensorflow,
    "keras": _tensorflow,
}
