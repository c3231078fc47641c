# SPDX-License-Identifier: Apache-2.0
"""conch's messages are those of tritonclient, grpc_health and grpc_reflection, and live beside them."""

import copy
import os
import pickle
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2 as their_health_pb2
from grpc_reflection.v1alpha import reflection_pb2 as their_reflection_pb2
from tests.support.grpc_transports import each_transport
from tritonclient.grpc import model_config_pb2 as their_model_config_pb2
from tritonclient.grpc import service_pb2 as their_inference_pb2

import conch.protocol
from conch.protocol import (
    health_pb2,
    inference_pb2,
    model_config_pb2,
    pool,
    reflection_pb2,
    reflection_v1alpha_pb2,
)

IMPORT_ROOT = Path(conch.protocol.__path__[0]).parents[1]
GENERATOR = Path(__file__).resolve().parents[3] / "scripts" / "generate_protocol.py"

# No installed package has reflection v1; it is v1alpha under another package name.
PAIRS = [
    pytest.param(inference_pb2, their_inference_pb2, id="inference"),
    pytest.param(model_config_pb2, their_model_config_pb2, id="model_config"),
    pytest.param(health_pb2, their_health_pb2, id="health"),
    pytest.param(reflection_pb2, their_reflection_pb2, id="reflection_v1"),
    pytest.param(reflection_v1alpha_pb2, their_reflection_pb2, id="reflection_v1alpha"),
]

Facts = dict[str, object]

grpc_transport = each_transport()


def file_proto(module: ModuleType) -> descriptor_pb2.FileDescriptorProto:
    file: FileDescriptor = module.DESCRIPTOR
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    return proto


def file_facts(file: descriptor_pb2.FileDescriptorProto) -> Facts:
    """Flattens all that matters on the wire or to users into one dict, keyed by dotted path."""
    prefix = f".{file.package}."

    def local(name: str) -> str:
        # Of v1 and v1alpha, only the package may differ.
        return name.removeprefix(prefix)

    facts: Facts = {
        "syntax": file.syntax,
        "messages": [message.name for message in file.message_type],
        "enums": [enum.name for enum in file.enum_type],
        "extensions": len(file.extension),
    }

    def add_enum(enum: descriptor_pb2.EnumDescriptorProto, path: str) -> None:
        facts[path] = (
            "enum",
            enum.options.SerializeToString(),
            str(enum.reserved_range),
            list(enum.reserved_name),
        )
        for value in enum.value:
            facts[f"{path}.{value.name}"] = ("enum value", value.number, value.options.SerializeToString())

    def add_message(message: descriptor_pb2.DescriptorProto, path: str) -> None:
        facts[path] = {
            "options": message.options.SerializeToString(),
            # The order of declaration is the order in which some runtimes print fields.
            "fields": [field.name for field in message.field],
            "oneofs": [oneof.name for oneof in message.oneof_decl],
            "extensions": len(message.extension) + len(message.extension_range),
            "reserved": (str(message.reserved_range), list(message.reserved_name)),
        }
        for field in message.field:
            facts[f"{path}.{field.name}"] = {
                "number": field.number,
                "type": descriptor_pb2.FieldDescriptorProto.Type.Name(field.type),
                "type name": local(field.type_name),
                "label": descriptor_pb2.FieldDescriptorProto.Label.Name(field.label),
                "oneof": message.oneof_decl[field.oneof_index].name
                if field.HasField("oneof_index")
                else None,
                "proto3 optional": field.proto3_optional,
                "default": field.default_value,
                "options": field.options.SerializeToString(),
            }
        for enum in message.enum_type:
            add_enum(enum, f"{path}.{enum.name}")
        for nested in message.nested_type:
            add_message(nested, f"{path}.{nested.name}")

    for enum in file.enum_type:
        add_enum(enum, enum.name)
    for message in file.message_type:
        add_message(message, message.name)
    for service in file.service:
        facts[service.name] = ("service", service.options.SerializeToString())
        for method in service.method:
            facts[f"{service.name}.{method.name}"] = {
                "input": local(method.input_type),
                "output": local(method.output_type),
                "client streaming": method.client_streaming,
                "server streaming": method.server_streaming,
                "options": method.options.SerializeToString(),
            }
    return facts


def differences(ours: Facts, theirs: Facts) -> list[str]:
    lines = [f"{path}: only in ours" for path in ours.keys() - theirs.keys()]
    lines += [f"{path}: only in theirs" for path in theirs.keys() - ours.keys()]
    lines += [
        f"{path}: ours {ours[path]!r}, theirs {theirs[path]!r}"
        for path in ours.keys() & theirs.keys()
        if ours[path] != theirs[path]
    ]
    return sorted(lines)


def all_messages(module: ModuleType) -> list[Descriptor]:
    file: FileDescriptor = module.DESCRIPTOR
    found = []
    pending = list(file.message_types_by_name.values())
    while pending:
        message = pending.pop()
        found.append(message)
        pending += message.nested_types
    return found


def runtime_facts(module: ModuleType) -> Facts:
    """Fields as the runtime made them of the descriptors: packing and presence follow from the syntax."""
    return {
        f"{message.full_name}.{field.name}".removeprefix(f"{message.file.package}."): (
            field.default_value if field.type != FieldDescriptor.TYPE_MESSAGE else None,
            field.has_presence,
            field.is_packed,
        )
        for message in all_messages(module)
        for field in message.fields
    }


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_descriptors_equal(ours: ModuleType, theirs: ModuleType) -> None:
    found = differences(file_facts(file_proto(ours)), file_facts(file_proto(theirs)))
    assert not found, f"tritonclient {version('tritonclient')}:\n" + "\n".join(found)
    assert not differences(runtime_facts(ours), runtime_facts(theirs))


def test_packages() -> None:
    for ours, theirs in (param.values for param in PAIRS):
        assert isinstance(ours, ModuleType) and isinstance(theirs, ModuleType)
        if ours is not reflection_pb2:
            assert file_proto(ours).package == file_proto(theirs).package
    assert file_proto(reflection_pb2).package == "grpc.reflection.v1"


def test_comparison_sees_every_kind_of_change() -> None:
    original = file_proto(inference_pb2)
    config = file_proto(model_config_pb2)

    def changed(file: descriptor_pb2.FileDescriptorProto, path: str, value: object) -> list[str]:
        other = copy.deepcopy(file)
        target: object = other
        *parents, last = path.split("/")
        for name in parents:
            target = target[int(name)] if name.isdigit() else getattr(target, name)  # type: ignore[index]
        if value is None:
            del target[int(last)]  # type: ignore[attr-defined]
        else:
            setattr(target, last, value)
        found = differences(file_facts(file), file_facts(other))
        assert len(differences(file_facts(other), file_facts(file))) == len(found)
        return found

    names = [message.name for message in original.message_type]
    request = f"message_type/{names.index('ModelInferRequest')}"
    parameter = f"message_type/{names.index('InferParameter')}"
    for path, value in [
        (f"{request}/field/0/number", 99),
        (f"{request}/field/0/name", "other"),
        (f"{request}/field/0/type", 12),
        (f"{request}/field/0/label", 3),
        (f"{request}/field/0/oneof_index", 0),
        (f"{request}/field/0/default_value", "x"),
        (f"{request}/field/4/type_name", ".inference.InferParameter"),
        (f"{request}/field/0/options/deprecated", True),
        (f"{request}/nested_type/0/field/0/number", 99),
        (f"{request}/nested_type/0/nested_type/0/options/map_entry", False),
        (f"{parameter}/field/0/proto3_optional", True),
        (f"{parameter}/oneof_decl/0/name", "other"),
        (f"{request}/field/0", None),
        (f"{request}/nested_type/0", None),
        (request, None),
        ("service/0/method/6/server_streaming", False),
        ("service/0/method/6/client_streaming", False),
        ("service/0/method/0/input_type", ".inference.ModelInferRequest"),
        ("service/0/method/0", None),
        ("service/0/name", "Other"),
    ]:
        if path.endswith("oneof_index"):
            # The field needs a group to join.
            grouped = copy.deepcopy(original)
            grouped.message_type[names.index("ModelInferRequest")].oneof_decl.add(name="group")
            assert changed(grouped, path, value), path
        else:
            assert changed(original, path, value), path
    for path, value in [
        ("enum_type/0/value/3/number", 99),
        ("enum_type/0/value/3/name", "TYPE_OTHER"),
        ("enum_type/0/value/3", None),
        ("enum_type/0", None),
    ]:
        assert changed(config, path, value), path


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_modules_offer_the_same_names(ours: ModuleType, theirs: ModuleType) -> None:
    names = {name for name in vars(theirs) if not name.startswith("_") and name != "model__config__pb2"}
    assert names <= set(vars(ours)), names - set(vars(ours))
    for name in names - {"DESCRIPTOR"}:
        one, other = getattr(ours, name), getattr(theirs, name)
        if isinstance(other, int):
            assert one == other
        elif isinstance(other, type):
            assert issubclass(one, Message)
            assert (one.__module__, one.__qualname__) == (ours.__name__, name)
        else:
            assert one.items() == other.items()


def test_nested_names() -> None:
    group = model_config_pb2.ModelInstanceGroup
    assert group.KIND_CPU == group.Kind.Value("KIND_CPU") == 2
    assert model_config_pb2.DataType.Name(model_config_pb2.TYPE_FP32) == "TYPE_FP32"
    tensor = inference_pb2.ModelInferRequest.InferInputTensor
    assert isinstance(inference_pb2.ModelInferRequest().inputs.add(), tensor)
    assert tensor.__qualname__ == "ModelInferRequest.InferInputTensor"
    assert type(inference_pb2.ModelConfigResponse().config) is model_config_pb2.ModelConfig
    assert inference_pb2.ModelInferRequest.MODEL_NAME_FIELD_NUMBER == 1


SCALARS: dict[int, object] = {
    FieldDescriptor.CPPTYPE_INT32: -7,
    FieldDescriptor.CPPTYPE_INT64: -(2**62),
    FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
    FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.1,
    FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    FieldDescriptor.CPPTYPE_BOOL: True,
}


def fill(message: Message, only: dict[str, int]) -> None:
    """Sets every field, and of a oneof the member whose turn ``only`` says it is."""
    for field in message.DESCRIPTOR.fields:
        group = field.containing_oneof
        if group is not None and group.fields[only["turn"] % len(group.fields)].name != field.name:
            continue
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            holder = getattr(message, field.name)
            entry = field.message_type
            assert entry is not None
            if entry.GetOptions().map_entry:
                key: object = "key" if entry.fields[0].type == FieldDescriptor.TYPE_STRING else 2**63
                if entry.fields[1].cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                    fill(holder[key], only)
                else:
                    holder[key] = "value"
            elif isinstance(holder, Message):
                holder.SetInParent()
                fill(holder, only)
            else:
                fill(holder.add(), only)
            continue
        value: object
        if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
            assert field.enum_type is not None
            value = field.enum_type.values[-1].number
        elif field.type == FieldDescriptor.TYPE_BYTES:
            value = b"\0\xff"
        else:
            value = SCALARS.get(field.cpp_type, "text \u00e9")
        current = getattr(message, field.name)
        if hasattr(current, "append"):
            current.extend([value, value])
        else:
            setattr(message, field.name, value)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_every_message_crosses_over(ours: ModuleType, theirs: ModuleType) -> None:
    assert ours.DESCRIPTOR.message_types_by_name
    for name in ours.DESCRIPTOR.message_types_by_name:
        our_class: type[Message] = getattr(ours, name)
        their_class: type[Message] = getattr(theirs, name)
        for turn in range(5):
            message = our_class()
            fill(message, {"turn": turn})
            there = their_class.FromString(message.SerializeToString(deterministic=True))
            assert str(there) == str(message)
            assert our_class.FromString(there.SerializeToString(deterministic=True)) == message
            for parsed in (there, our_class.FromString(there.SerializeToString())):
                size = parsed.ByteSize()
                parsed.DiscardUnknownFields()
                assert parsed.ByteSize() == size, name


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter with warnings as errors, and returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(IMPORT_ROOT), *sys.path[1:]])}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


IMPORT_OURS = (
    "from conch.protocol import inference_pb2 as ours, model_config_pb2, health_pb2, reflection_v1alpha_pb2\n"
)
IMPORT_THEIRS = (
    "import tritonclient.grpc\n"
    "from tritonclient.grpc import service_pb2 as theirs\n"
    "import grpc_health.v1.health_pb2, grpc_reflection.v1alpha.reflection_pb2\n"
)
EXCHANGE = """
def build(module):
    request = module.ModelInferRequest(model_name="m", id="1", raw_input_contents=[b"\\0" * 8])
    tensor = request.inputs.add(name="x", datatype="INT64", shape=[1])
    tensor.parameters["p"].int64_param = -1
    request.parameters["priority"].uint64_param = 2**64 - 1
    return request

for one, other in ((ours, theirs), (theirs, ours)):
    wire = build(one).SerializeToString(deterministic=True)
    parsed = other.ModelInferRequest.FromString(wire)
    assert parsed == build(other)
    assert parsed.SerializeToString(deterministic=True) == wire
assert ours.ModelInferRequest is not theirs.ModelInferRequest
assert ours.DESCRIPTOR.pool is not theirs.DESCRIPTOR.pool
tensor = tritonclient.grpc.InferInput("x", [1], "FP32")
print("ok")
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "imports",
    [
        pytest.param(IMPORT_THEIRS + IMPORT_OURS, id="tritonclient_first"),
        pytest.param(IMPORT_OURS + IMPORT_THEIRS, id="conch_first"),
    ],
)
def test_shares_a_process_with_tritonclient(imports: str) -> None:
    assert run_python(imports + EXCHANGE) == "ok\n"


@pytest.mark.process
def test_default_pool_stays_clean() -> None:
    modules = ", ".join(param.values[0].__name__.rpartition(".")[2] for param in PAIRS)  # type: ignore[union-attr]
    code = f"""
from conch.protocol import {modules}, pool
from google.protobuf import descriptor_pool
default = descriptor_pool.Default()
for name in pool.file_descriptor_protos():
    file = pool.POOL.FindFileByName(name)
    finders = [(default.FindFileByName, name)]
    for message in file.message_types_by_name.values():
        finders.append((default.FindFileContainingSymbol, message.full_name))
    for find, key in finders:
        try:
            find(key)
        except KeyError:
            continue
        raise AssertionError(key)
print("ok")
"""
    assert run_python(code) == "ok\n"


@pytest.mark.process
def test_package_alone_imports_nothing() -> None:
    code = "import sys, conch.protocol; print([name for name in sys.modules if name.startswith('google')])"
    assert run_python(code) == "[]\n"


@pytest.mark.process
def test_imports_from_many_threads() -> None:
    code = """
import importlib, threading
names = ["inference_pb2", "model_config_pb2", "health_pb2", "reflection_pb2", "reflection_v1alpha_pb2"]
start = threading.Barrier(20)
modules = []
def load(name):
    start.wait()
    modules.append(importlib.import_module("conch.protocol." + name))
threads = [threading.Thread(target=load, args=(name,)) for name in names * 4]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(modules) == 20 and len(set(modules)) == 5
from conch.protocol import inference_pb2, model_config_pb2
assert type(inference_pb2.ModelConfigResponse().config) is model_config_pb2.ModelConfig
print("ok")
"""
    assert run_python(code) == "ok\n"


@pytest.mark.process
def test_generated_files_are_current(tmp_path: Path) -> None:
    def check(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(GENERATOR), "--check", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    pytest.importorskip("grpc_tools", reason="grpcio-tools is only in the lint extra")
    result = check()
    assert result.returncode == 0, result.stderr

    result = check("--output", str(tmp_path))
    assert result.returncode == 1
    assert "inference_pb2.pyi: missing" in result.stderr
    assert "Run scripts/generate_protocol.py" in result.stderr


def test_request_round_trip() -> None:
    request = inference_pb2.ModelInferRequest(model_name="m", model_version="1", id="r")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    tensor.parameters["shared_memory_offset"].int64_param = -1
    request.outputs.add(name="y").parameters["classification"].int64_param = 3
    request.parameters["flag"].bool_param = False
    request.raw_input_contents.append(b"\0\0\x80\x3f" * 2)

    parsed = inference_pb2.ModelInferRequest.FromString(request.SerializeToString())

    assert parsed == request
    assert parsed.parameters["flag"].WhichOneof("parameter_choice") == "bool_param"
    assert pickle.loads(pickle.dumps(parsed)) == request
    assert copy.deepcopy(parsed) == request


def test_text_format_round_trip() -> None:
    text = """
        name: "m" backend: "onnxruntime" max_batch_size: 8
        input [
          { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] },
          { name: "f" data_type: TYPE_BOOL dims: 1 }
        ]
        output { name: "y" data_type: TYPE_STRING dims: [ 1 ] reshape { shape: [ ] } }
        instance_group [
          { kind: KIND_CPU count: 2 rate_limiter { resources { name: "r" global: true count: 1 } } }
        ]
        dynamic_batching {
          priority_levels: 2
          priority_queue_policy { key: 1 value { timeout_action: DELAY } }
        }
        parameters { key: "k" value { string_value: "v" } }  # a comment
        version_policy { all { } }
    """
    config = text_format.Parse(text, model_config_pb2.ModelConfig())

    assert config.input[0].dims == [-1, 4]
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    assert (
        config.dynamic_batching.priority_queue_policy[1].timeout_action
        == model_config_pb2.ModelQueuePolicy.DELAY
    )
    assert config.parameters["k"].string_value == "v"
    assert text_format.Parse(text_format.MessageToString(config), model_config_pb2.ModelConfig()) == config
    theirs = text_format.Parse(text, their_model_config_pb2.ModelConfig())
    assert theirs.SerializeToString(deterministic=True) == config.SerializeToString(deterministic=True)
    with pytest.raises(text_format.ParseError, match='no field named "nonsense"'):
        text_format.Parse("nonsense: 1", model_config_pb2.ModelConfig())


def test_reflection_files_rebuild_the_pool() -> None:
    files = pool.file_with_dependencies("inference/grpc_service.proto")
    names = [descriptor_pb2.FileDescriptorProto.FromString(file).name for file in files]
    assert names == ["inference/grpc_service.proto", "inference/model_config.proto"]

    # A client has nothing but the answer.
    client = descriptor_pool.DescriptorPool()
    for file in reversed(files):
        client.AddSerializedFile(file)
    service = client.FindServiceByName("inference.GRPCInferenceService")
    assert set(service.methods_by_name) == set(
        their_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    )
    assert set(files) <= set(pool.file_descriptor_protos().values())
    with pytest.raises(KeyError, match=r"nope\.proto"):
        pool.file_with_dependencies("nope.proto")


@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        ("inference.GRPCInferenceService", "inference/grpc_service.proto"),
        ("inference.GRPCInferenceService.ModelInfer", "inference/grpc_service.proto"),
        ("inference.ModelInferRequest.InferInputTensor", "inference/grpc_service.proto"),
        ("inference.ModelInferRequest.id", "inference/grpc_service.proto"),
        ("inference.DataType", "inference/model_config.proto"),
        ("inference.TYPE_FP32", "inference/model_config.proto"),
        ("grpc.health.v1.Health.Watch", "grpc/health/v1/health.proto"),
        ("grpc.reflection.v1.ServerReflection", "grpc/reflection/v1/reflection.proto"),
        ("grpc.reflection.v1alpha.ErrorResponse", "grpc/reflection/v1alpha/reflection.proto"),
    ],
)
def test_file_containing_symbol(symbol: str, file: str) -> None:
    assert pool.file_containing_symbol(symbol) == file


@pytest.mark.parametrize(
    "symbol", ["", ".", "inference", "inference.Nope", "inference.GRPCInferenceService.Nope", "\0"]
)
def test_unknown_symbol(symbol: str) -> None:
    with pytest.raises(KeyError, match="no file declares"):
        pool.file_containing_symbol(symbol)


def test_every_file_names_its_packages_in_other_languages() -> None:
    """So that code can be generated without a flag for each file."""
    content = (Path(conch.protocol.__path__[0]) / "descriptors.binpb").read_bytes()
    files = {file.name: file.options for file in descriptor_pb2.FileDescriptorSet.FromString(content).file}
    assert len(files) == 7
    for name, options in files.items():
        assert "/" in options.go_package, name
        assert options.java_package and options.java_multiple_files, name
        assert options.java_outer_classname.endswith("Proto"), name
    service, config = files["inference/grpc_service.proto"], files["inference/model_config.proto"]
    assert service.go_package == config.go_package == "conch/inference"
    assert service.java_outer_classname != config.java_outer_classname, "they are in one Java package"
