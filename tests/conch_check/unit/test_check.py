# ruff: noqa: E501  a case per line
"""``conch check`` on single models: each kind of problem, and where it is found."""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.configs import Layout, layouts
from tests.support.profiles import scaled
from tests.support.sites import Site as MakeSite

from conch.core.execution.placement import Devices
from conch.protocol.model_config_pb2 import ModelConfig
from conch_check.findings import Finding, ModelReport, Report
from conch_check.model_checks import Rules
from conch_check.report import as_json, as_text, is_clean
from conch_check.repository_checks import UnknownModelError, check_repositories
from conch_check.static_checks import ineffective_settings
from conch_control import repoagents
from conch_control.control_options import ControlOptions
from conch_control.repository.local import LocalRepository

if TYPE_CHECKING:
    from tests.support.sites import Site

IO = """input { name: "X" data_type: TYPE_UINT8 dims: 1 }
output { name: "X" data_type: TYPE_UINT8 dims: 1 }
"""
"""Two lines, behind the first one with the backend."""


def checked(site: Site, *repositories: Path, only: tuple[str, ...] = (), **options: Any) -> Report:
    control = ControlOptions(repositories=(), **options)
    rules = Rules(control, site.get_backend, ("echo", "other"))
    return check_repositories(map(LocalRepository, repositories or (site.repository,)), rules, only)


def model(site: Site, text: str, name: str = "m", **options: Any) -> ModelReport:
    site.model(name, config=text)
    report = checked(site, **options)
    return next(each for each in report.models if each.name == name)


def errors(checkup: ModelReport) -> list[Finding]:
    return [finding for finding in checkup.findings if finding.severity == "error"]


@pytest.mark.parametrize(
    ("line", "column", "path", "message", "details"),
    [
        ("max_batch_size: -1", 17, "max_batch_size", "must be non-negative", ("-1", "")),
        ("max_batch_siz: 1", 1, "max_batch_siz", "no field named", ("'max_batch_siz'", "max_batch_size")),
        ("input { data_type: TYPE_FP23 }", 20, "input[1].data_type", "no value named", ("'TYPE_FP23'", "TYPE_FP32")),
        ("max_batch_size: 1.5", 17, "max_batch_size", "Couldn't parse integer", ("1.5", "")),
        ('name: "n"', 7, "name", "unexpected directory name 'm' for model 'n'", ('"n"', "")),
        ('platform: "onnxruntime_onnx"', 11, "platform", "unexpected 'platform' and 'backend' pair", ('"onnxruntime_onnx"', "")),
        ('runtime: "r"', 10, "runtime", "unable to find backend library 'r'", ('"r"', "")),
        ('default_model_filename: "q"', 25, "default_model_filename", "unable to find '", ("nothing of that name", "")),
        ('default_model_filename: "../../q"', 25, "default_model_filename", "must stay within", ('"../../q"', "")),
        ('default_model_filename: "/etc/passwd"', 25, "default_model_filename", "must stay within", ('"/etc/passwd"', "")),
        ('input { name: "A" data_type: TYPE_FP32 dims: [ 3, 0 ] }', 51, "input[1].dims[1]", "must be integer >= 1", ("0", "")),
        ('input { name: "A" dims: 3 }', 7, "input[1].data_type", "must specify 'data_type'", ("nothing", "")),
        ('input { name: "X" data_type: TYPE_FP32 dims: 3 }', 15, "input[1].name", "specified more than once", ('"X"', "")),
        ("dynamic_batching { preferred_batch_size: [ 0 ] }", 44, "dynamic_batching.preferred_batch_size[0]", "must be positive", ("0", "")),
        ("dynamic_batching { preferred_batch_size: [ 2 ] }", 44, "dynamic_batching.preferred_batch_size[0]", "<= max batch size", ("2", "")),
        ("dynamic_batching { priority_levels: 2000 default_priority_level: 1 }", 37, "dynamic_batching.priority_levels", "not supported yet", ("2000", "")),
        ("instance_group { kind: KIND_GPU }", 24, "instance_group[0].kind", "no GPUs are available", ("KIND_GPU", "")),
        ("instance_group { kind: KIND_CPU gpus: 0 }", 39, "instance_group[0].gpus", "but specifies one or more GPUs", ("0", "")),
        ("instance_group { kind: 9 }", 24, "instance_group[0].kind", "no known kind", ("9", "")),
        ("response_cache { enable: true } sequence_batching {}", 26, "response_cache.enable", "sequence batching scheduler", ("true", "")),
        ("sequence_batching { control_input { control {} } }", 35, "sequence_batching.control_input[0].name", "must have a name", ("nothing", "")),
        ('sequence_batching { state { input_name: "a" output_name: "b" } }', 27, "sequence_batching.state[0].data_type", "must specify 'data_type'", ("nothing", "")),
        ('sequence_batching { state { input_name: "a" output_name: "b" data_type: TYPE_INT8 initial_state { name: "s" data_type: TYPE_INT8 data_file: "f" } } }', 141, "sequence_batching.state[0].initial_state[0].data_file", "failed to open text file for read", ('"f"', "")),
        ('model_warmup { batch_size: 1 inputs { key: "X" value { data_type: TYPE_UINT8 dims: 1 input_data_file: "f" } } }', 103, 'model_warmup[0].inputs["X"].input_data_file', "failed to open text file for read", ('"f"', "")),
        ('model_warmup { batch_size: 1 inputs { key: "Y" value { data_type: TYPE_UINT8 dims: 1 zero_data: true } } }', 14, "model_warmup[0]", "unexpected inference input 'Y'", None),
        ('batch_input { kind: BATCH_ELEMENT_COUNT target_name: "T" data_type: TYPE_FP32 source_input: "Z" }', 93, "batch_input[0].source_input[0]", "unknown source input name 'Z'", ('"Z"', "")),
        ('output { name: "L" data_type: TYPE_FP32 dims: 1 label_filename: "l.txt" }', 65, "output[1].label_filename", "failed to open text file for read", ('"l.txt"', "")),
        ('parameters { key: "CONCH_CACHE_TTL" value { string_value: "x" } }', 59, 'parameters["CONCH_CACHE_TTL"].string_value', "must be a number of seconds", ('"x"', "")),
        ('parameters { key: "CONCH_MAX_QUEUE_SIZE" value { string_value: "x" } }', 64, 'parameters["CONCH_MAX_QUEUE_SIZE"].string_value', "must be a whole number", ('"x"', "")),
        ('parameters { key: "CONCH_PADDING" value { string_value: "{}" } }', 57, 'parameters["CONCH_PADDING"].string_value', "inputs: is missing", ('"{}"', "")),
        ("version_policy { specific { versions: [ 1, 0 ] } } input { is_shape_tensor: true }", 77, "input[1].is_shape_tensor", "not supported yet", ("true", "")),
        ("model_repository_agents { agents { name: \"checksam\" } }", 42, "model_repository_agents.agents[0].name", "unable to find repository agent 'checksam'; there are: checksum", None),
        ("model_repository_agents { agents { name: \"checksum\" parameters { key: \"MD5:1/model.echo\" value: \"0\" } } }", 64, "model_repository_agents.agents[0].parameters", "Mismatched MD5 hash for file 1/model.echo, expect: 0, got: ", None),
        ("version_policy { specific { versions: 3 } }", 16, "version_policy", "at least one version must be available", ("version directories 1", "")),
        ("model_metrics { metric_control { metric_identifier {} histogram_options { buckets: 1 } } }", 52, "model_metrics.metric_control[0].metric_identifier.family", "non-empty 'family'", ("nothing", "")),
    ],
)  # fmt: skip
def test_each_kind_of_problem_is_found_in_its_place(
    site: Site, line: str, column: int, path: str, message: str, details: tuple[str, str] | None
) -> None:
    found = errors(model(site, f'backend: "echo"\n{IO}{line}\n'))
    assert path in [finding.path for finding in found], found
    finding = next(each for each in found if each.path == path)
    assert (finding.line, finding.column) == (4, column)
    assert message in finding.message
    assert finding.file == str(site.repository / "m" / "config.pbtxt")
    if details is not None:
        assert (finding.found, finding.nearest) == details


def test_repository_agents_of_others_are_not_run(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("theirs", "no.such.module:Hook", repoagents.GROUP)
    monkeypatch.setattr(repoagents, "entry_points", EntryPoints([entry]).select)
    agents = """model_repository_agents { agents { name: "theirs" }
        agents { name: "checksum" parameters { key: "MD5:of/what/it/makes" value: "0" } } }"""
    (finding,) = model(site, f'backend: "echo"\n{IO}{agents}').findings
    assert (finding.severity, finding.path) == ("note", "model_repository_agents.agents[0].name")
    assert "'theirs' is not run" in finding.message


def test_an_unknown_backend(site: Site) -> None:
    (finding,) = errors(model(site, f'backend: "ecko"\n{IO}'))
    assert (finding.line, finding.column, finding.path) == (1, 10, "backend")
    assert (finding.found, finding.nearest, finding.expected) == ("'ecko'", "echo", "one of echo, other")


def test_a_backend_that_nothing_tells(site: Site) -> None:
    (finding,) = errors(model(site, ""))
    assert (finding.line, finding.column, finding.path) == (1, 1, "backend")
    assert "Could not determine backend" in finding.message


def test_all_problems_of_a_config_at_once(site: Site) -> None:
    found = errors(
        model(
            site,
            """name: "other"
max_batch: 4
backend: "echo"
input [ { name: "X" data_type: TYPE_UINT9 dims: [ 0 ] }, { dims: [] } ]
output { name: "X" data_type: TYPE_UINT8 dims: 1 label_filename: "none" reshape { shape: [ 2 ] } }
dynamic_batching { preferred_batch_size: [ 8, -1 ] preserve_ordering: true priority_levels: 2 }
response_cache { enable: true }
instance_group [ { kind: KIND_GPU }, { kind: KIND_CPU gpus: 1 } ]
runtime: "x"
parameters { key: "CONCH_CACHE_TTL" value { string_value: "" } }
""",
        )
    )
    assert [(each.line, each.column, each.path) for each in found] == [
        (1, 7, "name"),
        (2, 1, "max_batch"),
        (4, 32, "input[0].data_type"),
        (4, 51, "input[0].dims[0]"),
        (4, 58, "input[1].name"),
        (4, 58, "input[1].data_type"),
        (4, 66, "input[1].dims"),
        (5, 66, "output[0].label_filename"),
        (5, 90, "output[0].reshape.shape"),
        (6, 18, "dynamic_batching.default_priority_level"),
        (6, 44, "dynamic_batching.preferred_batch_size[0]"),
        (6, 47, "dynamic_batching.preferred_batch_size[1]"),
        (6, 93, "dynamic_batching.priority_levels"),
        (7, 26, "response_cache.enable"),
        (8, 26, "instance_group[0].kind"),
        (8, 61, "instance_group[1].gpus"),
        (9, 10, "runtime"),
        (10, 59, 'parameters["CONCH_CACHE_TTL"].string_value'),
    ]


def test_what_only_follows_from_a_mistake_is_not_said(site: Site) -> None:
    found = errors(model(site, f'backend: "echo"\n{IO}max_batch_size: "4"\n'))
    assert [each.path for each in found] == ["max_batch_size"]


def test_other_models_are_checked_when_one_can_not_be_read(site: Site) -> None:
    site.model("a", config='backend: "echo" {')
    site.model("b", config=f'backend: "echo" {IO} max_batch_size: -1')
    (site.model("c") / "config.pbtxt").write_bytes(b"name: 'x'\n  \xff")
    (site.model("d") / "config.pbtxt").unlink()
    (site.repository / "d" / "config.pbtxt").mkdir()
    report = checked(site)
    assert [(each.name, errors(each)[0].line, errors(each)[0].column) for each in report.models] == [
        ("a", 1, 17),
        ("b", 3, 18),
        ("c", 2, 3),
        ("d", 0, 0),
    ]
    assert "Is a directory" in errors(report.models[3])[0].message


def test_version_directories(site: Site) -> None:
    site.model("m", versions={1: "ok", 2: "ok"})
    for name in ("01", "v3", "warmup", ".ipynb_checkpoints"):
        (site.repository / "m" / name).mkdir()
    site.model("none", versions={})
    report = checked(site)
    assert [(each.name, each.versions) for each in report.models] == [("m", (2,)), ("none", ())]
    assert [(each.severity, Path(each.file).name, each.message) for each in report.models[0].findings] == [
        (
            "warning",
            "01",
            "ignored as a version directory: its name contains leading zeros in its directory name",
        ),
        (
            "warning",
            "v3",
            "ignored as a version directory: its name fails to convert to integral number",
        ),
    ]
    (finding,) = errors(report.models[1])
    assert (finding.path, finding.found) == ("version_policy", "none")


def test_each_selected_version_needs_its_file(site: Site) -> None:
    directory = site.model("m", {1: "ok", 2: "ok"}, f'backend: "echo"\n{IO}version_policy {{ all {{}} }}')
    (directory / "1" / "model.echo").unlink()
    (finding,) = errors(checked(site).models[0])
    assert finding.expected == "a file or folder 'model.echo' in version directory 1"
    (directory / "1" / "network.bin").write_bytes(b"ptrt" + bytes(8))
    (finding,) = errors(checked(site).models[0])
    assert finding.found == "'network.bin', which is a TensorRT plan; backend \"tensorrt\" serves it"


def test_settings_that_nothing_reads() -> None:
    config = ModelConfig()
    for name in ("INFERENC_MODE", "session.x", "MAX_THINGS", "CONCH_TEXT_INPUT"):  # the last is an add-on's
        config.parameters[name].string_value = "1"
    known = ("INFERENCE_MODE", "session.")
    found = {each.path: each.nearest for each in ineffective_settings(config, known, passed_on=False)}
    assert found == {'parameters["INFERENC_MODE"]': "INFERENCE_MODE", 'parameters["MAX_THINGS"]': ""}
    assert list(ineffective_settings(config, known)) == []  # a model may read them
    config.model_metrics.metric_control.add().metric_identifier.family = "f"
    (problem,) = ineffective_settings(config, known)
    assert problem.path == "model_metrics.metric_control[0].metric_identifier.family"
    assert problem.expected == "'nv_inference_first_response_histogram_ms'"


@pytest.mark.parametrize(
    ("line", "column", "path"),
    [
        ("version_policy { specific { versions: [ 1, 5 ] } }", 44, "version_policy.specific.versions[1]"),
        ("dynamic_batching {}", 18, "dynamic_batching"),
        (
            "max_batch_size: 1 dynamic_batching { default_queue_policy { allow_timeout_override: true } }",
            85,
            "dynamic_batching.default_queue_policy.allow_timeout_override",
        ),
        (
            "max_batch_size: 1 dynamic_batching { priority_queue_policy { key: 1 value { max_queue_size: 1 } } }",
            60,
            "dynamic_batching.priority_queue_policy",
        ),
        ('instance_group { host_policy: "h" }', 31, "instance_group[0].host_policy"),
        ('model_warmup { name: "s" inputs { key: "X" value { data_type: TYPE_UINT8 dims: 1 zero_data: true } } }', 14, "model_warmup[0].batch_size"),
        ('parameters { key: "CONCH_PADING" value {} }', 40, 'parameters["CONCH_PADING"]'),
        ("dynamic_batching { default_queue_policy { timeout_action: 7 max_queue_size: 1 } }", 59,
         "dynamic_batching.default_queue_policy.timeout_action"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_warnings(site: Site, line: str, column: int, path: str) -> None:
    checkup = model(site, f'backend: "echo"\n{IO}{line}\n')
    assert not checkup.failed
    found = {finding.path: finding for finding in checkup.findings}
    assert (found[path].severity, found[path].line, found[path].column) == ("warning", 4, column)
    report = checked(site)
    assert (is_clean(report, False), is_clean(report, True)) == (True, False)
    site.agent().load("m", {})


def test_duplicates_and_the_ensembles_that_need_them(site: Site, tmp_path: Path) -> None:
    second = tmp_path / "second"
    site.model("m")
    site.model("m", repository=second)
    site.model("e", {1: ""}, ensemble({"m": "X"}), repository=second)
    report = checked(site, site.repository, second)
    assert [each.location for each in report.models if each.name == "m"] == [
        str(site.repository / "m"),
        str(second / "m"),
    ]
    for each in report.models:
        (finding,) = errors(each)
        if each.name == "m":
            assert finding.message == "model 'm' appears in two or more repositories"
        else:
            assert "not available or ambiguous: m" in finding.message
            assert finding.found == "'m', which is in two or more repositories"


def ensemble(steps: dict[str, str | tuple[str, str]], more: str = "") -> str:
    """An ensemble whose steps run one after the other, each with the names of its model's input and output."""
    text = """platform: "ensemble"
input { name: "A0" data_type: TYPE_UINT8 dims: 1 }
"""
    text += f'output {{ name: "A{len(steps)}" data_type: TYPE_UINT8 dims: 1 }}\nensemble_scheduling {{\n'
    for number, (name, ends) in enumerate(steps.items()):
        taken, made = (ends, ends) if isinstance(ends, str) else ends
        text += f'step {{ model_name: "{name}" model_version: -1\n'
        text += f'input_map {{ key: "{taken}" value: "A{number}" }}\n'
        text += f'output_map {{ key: "{made}" value: "A{number + 1}" }} }}\n'
    return text + "}\n" + more


@pytest.mark.parametrize(
    ("text", "line", "column", "path", "message", "nearest"),
    [
        (ensemble({"mm": "X"}), 5, 20, "ensemble_scheduling.step[0].model_name", "not available", "m"),
        (ensemble({"m": "x"}), 6, 29, 'ensemble_scheduling.step[0].input_map["x"]', "non-existing input x", ""),
        (ensemble({"m": "x"}), 7, 30, 'ensemble_scheduling.step[0].output_map["x"]', "non-existing output x", ""),
        (ensemble({"m": "x"}), 6, 11, "ensemble_scheduling.step[0].input_map", "is not mapped", ""),
        (ensemble({"m": "X"}).replace("_version: -1", "_version: 4"), 5, 39, "ensemble_scheduling.step[0].model_version", "required version 4", ""),
        (ensemble({"m": "X", "e": "X"}), 8, 20, "ensemble_scheduling.step[1].model_name", "circular dependency between ensembles: e -> ... -> e -> e", ""),
        (ensemble({"bad": "X"}), 5, 20, "ensemble_scheduling.step[0].model_name", "which has no loaded version", ""),
        (ensemble({"m": "X"}).replace("UINT8", "INT8", 1), 6, 29, 'ensemble_scheduling.step[0].input_map["X"]', "inconsistent data type", ""),
        (ensemble({"m": "X"}).replace("dims: 1", "dims: 2", 1), 6, 29, 'ensemble_scheduling.step[0].input_map["X"]', "inconsistent shape", ""),
        (ensemble({"m": "X"}, "max_batch_size: 9"), 9, 17, "max_batch_size", "only allows maximum batch size to be 4", ""),
        (ensemble({"m": "X"}, "instance_group {}"), 9, 16, "instance_group", "should not be specified", ""),
        (ensemble({"m": "X"}).replace('value: "A1"', 'value: "A1x"'), 3, 16, "output[0].name", "is not used", "A1x"),
        (ensemble({"m": "X"}, 'parameters { key: "CONCH_MAX_QUEUE_SIZE" value { string_value: "2" } }'), 9, 64, 'parameters["CONCH_MAX_QUEUE_SIZE"].string_value', "can not be specified for ensemble", ""),
        (ensemble({"stateful": "X"}, "response_cache { enable: true }"), 9, 26, "response_cache.enable", "sequence batching scheduler", ""),
    ],
)  # fmt: skip
def test_ensembles_against_their_models(
    site: Site, text: str, line: int, column: int, path: str, message: str, nearest: str
) -> None:
    site.model("m", config=f'backend: "echo" max_batch_size: 4 {IO}')
    site.model("bad", config='backend: "echo" max_batch_size: -1')
    site.model("stateful", config=f'backend: "echo" sequence_batching {{}} {IO}')
    found = errors(model(site, text, "e"))
    finding = next((each for each in found if each.path == path), None)
    assert finding is not None, found
    assert (finding.line, finding.column, finding.nearest) == (line, column, nearest)
    assert message in finding.message
    with pytest.raises(Exception, match=r"."):
        site.agent().load("e", {})


def test_circles_over_several_ensembles(site: Site) -> None:
    site.model("m")
    site.model("a", {1: ""}, ensemble({"m": "X", "b": "A0"}))
    site.model("b", {1: ""}, ensemble({"c": "A0"}))
    site.model("c", {1: ""}, ensemble({"a": "A0"}))
    site.model("above", {1: ""}, ensemble({"a": "A0"}))
    report = {each.name: errors(each) for each in checked(site).models}
    assert "circular dependency" in report["a"][0].message
    assert report["a"][0].path == "ensemble_scheduling.step[1].model_name"
    assert "circular dependency" in report["b"][0].message
    assert "circular dependency" in report["c"][0].message
    assert "depends on 'a' which has no loaded version" in report["above"][0].message


def test_nested_ensembles_are_clean(site: Site) -> None:
    site.model("m")
    site.model("z", {1: ""}, ensemble({"m": "X"}))
    site.model("a", {1: ""}, ensemble({"m": "X", "z": ("A0", "A1")}))
    assert is_clean(checked(site), True)
    site.model("z", {1: ""}, ensemble({"m": "X"}).replace("dims: 1", "dims: 2"))
    report = checked(site)
    assert [(each.name, each.failed) for each in report.models] == [("a", True), ("m", False), ("z", True)]


def test_only_the_named_models_are_reported(site: Site) -> None:
    site.model("m", config="x")
    site.model("e", {1: ""}, ensemble({"m": "X"}))
    site.model("other", config="x")
    report = checked(site, only=("e",))
    assert [each.name for each in report.models] == ["e"]
    assert "has errors itself" in errors(report.models[0])[0].message
    with pytest.raises(UnknownModelError, match=r"no repository has a model 'othr'; did you mean 'other'\?"):
        checked(site, only=("othr",))


def test_the_backend_completes_what_is_checked_and_shown(site: Site) -> None:
    directory = site.model("m", config='backend: "echo"\n')
    completed = json.dumps(
        {"input": [{"name": "X", "data_type": "TYPE_UINT8", "dims": [1]}], "max_batch_size": 2}
    )
    (directory / "1" / "complete.json").write_text(completed)
    (checkup,) = checked(site).models
    assert checkup.config is not None
    assert checkup.config.max_batch_size == 2
    assert checkup.origins["max_batch_size"] == "model"
    assert checkup.origins["input[0].dims"] == "model"
    assert checkup.origins["backend"] == "config.pbtxt"
    assert checkup.origins["instance_group[0].count"] == "default"
    assert "config.pbtxt:1:10" in as_text(Report((), [checkup]), show=True)
    (found,) = as_json(Report((), [checkup]), False, show=True)["models"]
    assert found["config"]["max_batch_size"] == 2
    assert found["origins"]["max_batch_size"] == "model"


def test_without_completion_configs_must_be_whole(site: Site) -> None:
    site.model("m", config='backend: "echo" input { name: "X" }')
    (finding, *_) = errors(checked(site, strict_model_config=True).models[0])
    assert "must specify 'data_type'" in finding.message
    site.model("n", config=None)
    report = checked(site, strict_model_config=True)
    assert "No such file or directory" in errors(report.models[1])[0].message


def test_named_variants_of_configs(site: Site) -> None:
    directory = site.model("m")
    (directory / "configs").mkdir()
    (directory / "configs" / "big.pbtxt").write_text(f'backend: "echo"\n{IO}max_batch_size: -1\n')
    site.model("n")
    report = checked(site, model_config_name="big")
    (finding,) = errors(report.models[0])
    assert finding.file == str(directory / "configs" / "big.pbtxt")
    assert not report.models[1].findings


def test_a_config_that_no_server_would_parse(site: Site) -> None:
    (finding,) = errors(model(site, f'backend: "echo"\n{IO}', max_config_bytes=20))
    assert "bytes is too large: --max-model-config-size allows 20" in finding.message


def test_gpus_that_are_checked_for(site: Site) -> None:
    text = f'backend: "echo"\n{IO}instance_group {{ gpus: [ 0, 1 ] kind: KIND_GPU }}'
    assert not model(site, text, devices=Devices((0, 1))).failed
    (finding,) = errors(model(site, text, devices=Devices((0,))))
    assert finding.expected == "some of the GPUs 0"


FRAGMENTS = [
    "max_batch_size: 4",
    "max_batch_size: -1",
    "max_batch_size: 0",
    'name: "m"',
    'name: "n"',
    "dynamic_batching { }",
    "dynamic_batching { preferred_batch_size: 3 }",
    "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
    "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value {} } }",
    "dynamic_batching { priority_levels: 5000 default_priority_level: 1 }",
    "sequence_batching { }",
    "sequence_batching { oldest { preferred_batch_size: 4 } }",
    'sequence_batching { control_input { name: "S" control { int32_false_true: [ 0, 1 ] } } }',
    'sequence_batching { control_input { name: "S" control { int32_false_true: [ 0 ] } } }',
    'sequence_batching { control_input { name: "S" control { kind: 9 } } }',
    'sequence_batching { state { input_name: "a" output_name: "b" data_type: TYPE_INT8 dims: 1 } }',
    'sequence_batching { state { input_name: "a" output_name: "b" data_type: TYPE_INT8 dims: 2 initial_state {'
    ' name: "i" data_type: TYPE_INT8 dims: 2 zero_data: true } } }',
    'sequence_batching { state { input_name: "a" output_name: "b" data_type: TYPE_INT8 dims: 2 initial_state {'
    ' name: "i" data_type: TYPE_INT8 dims: 3 data_file: "f" } } }',
    'sequence_batching { state { input_name: "a" } }',
    "response_cache { enable: true }",
    "model_transaction_policy { decoupled: true }",
    'input { name: "Y" data_type: TYPE_FP32 dims: -1 optional: true }',
    'input { name: "Y" data_type: TYPE_FP32 dims: [ 0, -2 ] }',
    'input { name: "Y" data_type: TYPE_FP32 dims: 6 reshape { shape: [ 2, 3 ] } }',
    'input { name: "Y" data_type: TYPE_FP32 dims: 6 reshape { shape: [ 4 ] } }',
    'input { name: "Y" data_type: TYPE_FP32 dims: 6 reshape { } }',
    'input { name: "Y" data_type: 77 dims: 6 }',
    "input { }",
    'input { name: "X" data_type: TYPE_UINT8 dims: 1 }',
    'output { name: "Y" data_type: TYPE_STRING dims: 1 label_filename: "../l" }',
    'output { name: "Y" data_type: TYPE_STRING dims: 1 label_filename: "config.pbtxt" }',
    'output { name: "Y" data_type: TYPE_STRING dims: 1 is_shape_tensor: true }',
    "instance_group { count: 2 }",
    "instance_group { count: 0 kind: KIND_MODEL }",
    "instance_group { kind: KIND_GPU }",
    "instance_group { kind: 17 }",
    'instance_group { rate_limiter { resources { name: "R" count: 1 } priority: 2 } }',
    'instance_group { passive: true host_policy: "h" }',
    'batch_input { kind: BATCH_ITEM_SHAPE target_name: "T" data_type: TYPE_INT32 source_input: "X" }',
    'batch_input { kind: 99 target_name: "T" data_type: TYPE_INT32 source_input: "X" }',
    'batch_input { kind: BATCH_ITEM_SHAPE target_name: "X" data_type: TYPE_INT8 source_input: "Z" }',
    "batch_input { data_type: TYPE_INT32 }",
    'batch_output { target_name: "X" source_input: "X" }',
    'batch_output { target_name: "Q" }',
    'model_warmup { name: "w" batch_size: 1 inputs { key: "X" value { data_type: TYPE_UINT8 dims: 1 zero_data: true'
    " } } }",
    'model_warmup { name: "w" batch_size: 9 inputs { key: "X" value { data_type: TYPE_UINT8 dims: 1 random_data: '
    "true } } }",
    'model_warmup { name: "w" batch_size: 1 inputs { key: "X" value { data_type: TYPE_UINT8 dims: 2 zero_data: true'
    " } } }",
    'model_warmup { name: "w" batch_size: 1 inputs { key: "X" value { dims: -1 } } }',
    'model_warmup { name: "w" inputs { key: "X" value { dims: -1 } } }',
    'parameters { key: "CONCH_CACHE_TTL" value { string_value: "5" } }',
    'parameters { key: "CONCH_CACHE_TTL" value { string_value: "-5" } }',
    'parameters { key: "CONCH_MAX_QUEUE_SIZE" value { string_value: "5" } }',
    'parameters { key: "CONCH_MAX_QUEUE_SIZE" value { string_value: "" } }',
    """parameters { key: "CONCH_PADDING" value { string_value: '{"inputs": {"Y": {"axis": 0, "to": "pow2"}}}' } }""",
    """parameters { key: "CONCH_PADDING" value { string_value: '{"inputs": {"Y": {"axis": 0, "to": [4], "value": "s"}},
 "outputs": {"X": {"axis": 0, "like": "Y"}}, "max_batch_elements": 4}' } }""".replace("\n", ""),
    """parameters { key: "CONCH_PADDING" value { string_value: '{"inputs": {"Z": {"axis": 1, "to": 3}}}' } }""",
    'parameters { key: "other" value { string_value: "" } }',
    "version_policy { all {} }",
    "version_policy { specific { versions: [ 1, 7 ] } }",
    "version_policy { specific { versions: 7 } }",
    'runtime: "libtriton_echo.so"',
    'runtime: "x"',
    'default_model_filename: "model.echo"',
    'default_model_filename: "../1/model.echo"',
    'default_model_filename: "q"',
    'platform: "p"',
    'platform: "ensemble"',
    "ensemble_scheduling { }",
    'model_metrics { metric_control { metric_identifier { family: "f" } histogram_options {} } }',
    "model_metrics { metric_control { } }",
    "optimization { graph { level: 1 } }",
    'model_repository_agents { agents { name: "a" } }',
    'model_repository_agents { agents { name: "checksum" } }',
    'model_repository_agents { agents { name: "checksum" parameters { key: "MD5:1/model.echo" value: "" } } }',
    'model_repository_agents { agents { name: "checksum" parameters { key: "MD5:1/model.echo" value:'
    ' "444bcb3a3fcf8389296c49467f27e1d6" } } }',
    'cc_model_filenames { key: "7.5" value: "x" }',
    "nonsense: 3",
    "max_batch_size: x",
]


@settings(max_examples=scaled(100))
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=4, unique=True), st.booleans())
def test_finds_a_problem_exactly_when_the_load_fails(fragments: list[str], strict: bool) -> None:
    text = "\n".join(['backend: "echo"', IO, *fragments])
    with tempfile.TemporaryDirectory() as root:
        site = MakeSite(Path(root))
        try:
            checkup = model(site, text, strict_model_config=strict)
            refused = None
            try:
                site.agent(strict_model_config=strict).load("m", {})
            except Exception as error:
                refused = error
            assert checkup.failed == (refused is not None), (refused, checkup.findings)
            for finding in checkup.findings:
                assert finding.line >= 1
        finally:
            site.close()


@given(layouts())
def test_never_fails_itself(made: tuple[ModelConfig, Layout]) -> None:
    """No config makes the check stop at an exception that it does not know."""
    _, layout = made
    with tempfile.TemporaryDirectory() as root:
        site = MakeSite(Path(root))
        checkup = model(site, layout.text)
        as_text(Report((), [checkup]), show=True)
        json.dumps(as_json(Report((), [checkup]), True, show=True))
        for finding in checkup.findings:
            assert "Error: " not in finding.message, finding
        site.close()


PARTS = {
    "m": f'backend: "echo" {IO}',
    "batching": f'backend: "echo" max_batch_size: 2 {IO}',
    "other": 'backend: "echo" input { name: "X" data_type: TYPE_FP32 dims: 1 } output { name: "X" data_type: TYPE_FP32 dims: 1 }',
    "two": f'backend: "echo" input {{ name: "Z" data_type: TYPE_UINT8 dims: 1 }} {IO}',
    "bad": f'backend: "echo" max_batch_size: -1 {IO}',
    "stateful": f'backend: "echo" sequence_batching {{}} {IO}',
    "decoupled": f'backend: "echo" model_transaction_policy {{ decoupled: true }} {IO}',
}
ENSEMBLES = ("e", "f", "g")


@st.composite
def ensembles(draw: st.DrawFn) -> str:
    names = draw(
        st.lists(st.sampled_from((*PARTS, *ENSEMBLES, "missing")), min_size=1, max_size=2, unique=True)
    )
    text = ensemble({name: "X" if name in PARTS else ("A0", "A1") for name in names})
    if draw(st.booleans()):
        text = text.replace("model_version: -1", "model_version: 1")
    for old, new in (("TYPE_UINT8", "TYPE_INT8"), ("dims: 1", "dims: -1"), ('"A1"', '"A0"'), ("-1", "2")):
        if draw(st.integers(0, 9)) == 0:
            text = text.replace(old, new, 1)
    if draw(st.integers(0, 3)) == 0:
        text += draw(
            st.sampled_from(["max_batch_size: 2", "response_cache { enable: true }", "max_batch_size: 3"])
        )
    return text


@settings(max_examples=scaled(25))
@given(st.lists(ensembles(), min_size=1, max_size=3))
def test_ensembles_have_problems_exactly_when_they_can_not_be_loaded(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        site = MakeSite(Path(root))
        try:
            for name, text in PARTS.items():
                site.model(name, config=text)
            for name, text in zip(ENSEMBLES, texts, strict=False):
                site.model(name, {1: ""}, text)
            report = checked(site)
            failed = {failure.name: failure.reason for failure in site.agent("none").start()}
            assert {each.name for each in report.models if each.failed} == set(failed), (failed, report)
        finally:
            site.close()


def test_a_declaration_of_a_rollout(site: Site) -> None:
    for name, steps in (("m", "1% 1m"), ("n", "2% 1m"), ("wrong", "1%")):
        site.model(name, config='backend: "echo" ' + IO)
        text = f'labels = {{ best = 6 }}\n[rollout]\ngroup = "g"\nsteps = ["{steps}"]'
        (site.repository / name / "rollout.toml").write_text(text)
    found = {each.name: each.findings for each in checked(site).models}
    for name, other in (("m", "n"), ("n", "m")):
        assert [(each.severity, each.file, each.message) for each in found[name]] == [
            ("warning", f"{site.repository}/{name}/rollout.toml", f"rollout.toml: {text}")
            for text in (
                "labels.best: version 6 has no directory; the label waits for it",
                f"rollout.steps: differ from those of '{other}', which is in the same group; give both the same steps",
            )
        ]
    assert [(each.severity, each.message[:28]) for each in found["wrong"]] == [
        ("error", "rollout.toml: rollout.steps[")
    ]
