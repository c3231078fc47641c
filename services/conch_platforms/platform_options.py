"""Settings and options of the platforms' ports and routes, and the defaults that follow from the platform.

Imports little: the routes are imported where a platform is served.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from conch.frontends.http.http_options import HTTP_THREADS, HttpOptions
from conch.server_options import AddOnOptions, AddOnSettings, Detected, Opening, PartOptions
from conch.settings.option import FlagError, Setting, Settings, nested, option, settings_of
from conch.settings.value_types import ANY_PORT, BOOL, DIRECTORY, MOST_PORT, POSITIVE, TEXT, ValueType
from conch_frames.frame_settings import FrameSettings
from conch_platforms.platform_defaults import Disk
from conch_platforms.platform_detection import (
    AZUREML,
    KSERVE,
    SAGEMAKER,
    SELDON,
    VERTEX_AI,
    detect_platform,
)
from conch_platforms.sagemaker_defaults import ADDITIONAL_ARGS

if TYPE_CHECKING:
    from conch.frontends.http.route_provider import RouteProvider


@dataclass(frozen=True, slots=True)
class PortRange:
    """The ports from one to another."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last


def _port_range(text: str) -> PortRange:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= MOST_PORT):
        raise argparse.ArgumentTypeError(
            f"must be of the form <first>-<last>, from 1 to {MOST_PORT}, got {text}"
        )
    return PortRange(int(first), int(last))


def _route(text: str) -> str:
    if not text.startswith("/") or "?" in text or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"must be a path that begins with /, got '{text}'")
    return text


_ROUTE = ValueType("path", _route)
_SAFE_PORTS = {
    "http-port": "allow-http",
    "grpc-port": "allow-grpc",
    "metrics-port": "allow-metrics",
    "vertex-ai-port": "allow-vertex-ai",
}
"""Ports that lie in SageMaker's safe range, and the switches that open them."""
_SCORING = "invocations"
_THREADS = "1, or Triton's default 8, which is taken for it: one thread serves all connections"


@dataclass(frozen=True, slots=True)
class SageMakerSettings:
    """The port that SageMaker calls."""

    GROUP: ClassVar = "SageMaker"
    SWITCH: ClassVar = Setting("--allow-sagemaker", BOOL, False, "serve SageMaker's routes")

    port: int = option("--sagemaker-port", ANY_PORT, 8080, "port for SageMaker; 0 for any free one")
    safe_ports: PortRange | None = option(
        "--sagemaker-safe-port-range",
        ValueType("range", _port_range),
        None,
        "<first>-<last>: in which the ports of all other protocols must lie",
    )
    threads: int = option("--sagemaker-thread-count", HTTP_THREADS, 8, _THREADS)
    default_model: str = option("--sagemaker-default-model", TEXT, "", "model of /invocations", optional=True)
    ping_mode: str = option(
        "--sagemaker-ping-mode",
        TEXT,
        "ready",
        "what /ping tells: whether the server is ready, or live",
        choices=("ready", "live"),
    )
    inference_type: str = option(
        "--sagemaker-inference-type",
        TEXT,
        "infer",
        "protocol of inference requests; invocations: rows in JSON, CSV, Arrow or Parquet",
        choices=("infer", "generate", "generate_stream", _SCORING),
    )
    multi_model: bool = option(
        "--sagemaker-multi-model", BOOL, False, "let SageMaker load and unload models (multi-model endpoint)"
    )
    session_s: int = option(
        "--sagemaker-session-secs",
        POSITIVE,
        1200,
        "time after which a stateful session ends",
        unit="seconds",
    )
    # Where a multi-model endpoint gets its models; SageMaker's own path, so that only tests change it.
    models_root: Path = option("--sagemaker-models-root", DIRECTORY, Path("/opt/ml/models"), "", listed=False)

    def routes(self) -> RouteProvider:
        """The routes. Raises FlagError: settings contradict each other."""
        from conch_platforms.sagemaker_routes import SageMakerPlatform
        from conch_platforms.sagemaker_sessions import SageMakerSessions

        kind = self.inference_type
        if self.multi_model and kind != "infer":
            raise FlagError(
                f"--sagemaker-multi-model serves infer only, not --sagemaker-inference-type={kind}"
            )
        return SageMakerPlatform(
            SageMakerSessions(self.session_s),
            self.default_model,
            self.ping_mode,
            kind,
            self.models_root if self.multi_model else None,
        )


@dataclass(frozen=True, slots=True)
class VertexAiSettings:
    """The port that Vertex AI calls."""

    GROUP: ClassVar = "Vertex AI"
    SWITCH: ClassVar = Setting("--allow-vertex-ai", BOOL, False, "serve Vertex AI's routes")

    port: int = option("--vertex-ai-port", ANY_PORT, 8080, "port for Vertex AI; 0 for any free one")
    threads: int = option("--vertex-ai-thread-count", HTTP_THREADS, 8, _THREADS)
    default_model: str = option(
        "--vertex-ai-default-model",
        TEXT,
        "",
        "model of the predict route; without it the only model of the repository",
        optional=True,
    )
    predict_route: str | None = option("--vertex-ai-predict-route", _ROUTE, None, "path of predictions")
    health_route: str | None = option("--vertex-ai-health-route", _ROUTE, None, "path of health checks")

    def routes(self) -> RouteProvider:
        """The routes. Raises FlagError: one is not given."""
        from conch_platforms.vertex_ai_routes import VertexAiPlatform

        # The first text is Triton's, "API_" and all.
        if self.predict_route is None:
            raise FlagError("API_PREDICT_ROUTE is not defined for Vertex AI endpoint: set AIP_PREDICT_ROUTE")
        if self.health_route is None:
            raise FlagError("AIP_HEALTH_ROUTE is not defined for Vertex AI endpoint")
        return VertexAiPlatform(self.predict_route, self.health_route, self.default_model)


@dataclass(frozen=True, slots=True)
class AzureMlSettings:
    """Paths of an online endpoint, on the REST port."""

    GROUP: ClassVar = "Azure ML"

    scoring_route: str = option(
        "--azureml-scoring-route",
        _ROUTE,
        "",
        "further path of inference with the default model",
        optional=True,
    )
    liveness_route: str = option(
        "--azureml-liveness-route", _ROUTE, "", "further path of /v2/health/live", optional=True
    )
    readiness_route: str = option(
        "--azureml-readiness-route", _ROUTE, "", "further path of /v2/health/ready", optional=True
    )
    default_model: str = option(
        "--azureml-default-model",
        TEXT,
        "",
        "model of the scoring route; without it the only model of the repository",
        optional=True,
    )

    def added_to(self, http: HttpOptions | None) -> HttpOptions | None:
        """The options of the REST port, with these paths if there are any. Raises FlagError: they clash."""
        routes = (self.scoring_route, self.liveness_route, self.readiness_route)
        given = [each for each in routes if each]
        if not given:
            if self.default_model:
                raise FlagError("--azureml-default-model needs --azureml-scoring-route")
            return http
        if http is None:
            raise FlagError("Azure ML's routes are further paths of REST: they need --allow-http")
        if len(set(given)) < len(given):
            raise FlagError("the routes of Azure ML must differ from each other")
        from conch_platforms.azureml_routes import AzureMlPlatform

        return replace(http, platform=AzureMlPlatform(*routes, self.default_model))


@dataclass(frozen=True, slots=True)
class PlatformOptions(AddOnOptions):
    """The ports of SageMaker and Vertex AI.

    Attributes:
        http: The options of each.
        loads: True if SageMaker loads models.
    """

    for_clients: ClassVar[bool] = True

    http: tuple[HttpOptions, ...]
    loads: bool = False

    @property
    def ports(self) -> Sequence[int]:
        """The ports to listen on."""
        return [each.port for each in self.http]

    def openings(self, options: PartOptions) -> Sequence[Opening]:
        """Inference, and loading."""
        from conch.process.exposure import INFERENCE, LOADING, clients_of

        found = [Opening(INFERENCE, clients_of(each, "inference"), each.title) for each in self.http]
        if self.loads and options.server.allow_model_control:
            found += [
                Opening(LOADING, clients_of(each, "model-repository"), each.title) for each in self.http
            ]
        return found


@dataclass(frozen=True, slots=True)
class PlatformSettings(AddOnSettings):
    """Settings of the hosting platform and of the routes that it calls.

    Attributes:
        DISK: Shows the platforms' mounts.
    """

    GROUP: ClassVar = "platform"
    PROTOCOLS: ClassVar = {"SageMaker": "sagemaker", "Vertex AI": "vertex_ai"}
    FLAGS_VARIABLE: ClassVar = ADDITIONAL_ARGS
    DISK: ClassVar = Disk()

    platform: str = option(
        "--platform",
        TEXT,
        "auto",
        "where conch runs, which decides defaults of other settings; auto: as variables and mounted "
        "directories tell, see docs/platforms.md",
        choices=("auto", "none", KSERVE, SAGEMAKER, VERTEX_AI, AZUREML, SELDON),
        scope="process",
    )
    sagemaker: SageMakerSettings = nested(SageMakerSettings)
    vertex_ai: VertexAiSettings = nested(VertexAiSettings)
    azureml: AzureMlSettings = nested(AzureMlSettings)

    @classmethod
    def detect(cls, environment: Mapping[str, str], given: Mapping[str, Any]) -> Detected:
        """The defaults on this platform. Raises FlagError: its model directory can't be served."""
        found = detect_platform(environment, given, cls.DISK)
        notes: tuple[str, ...] = ()
        if found.platform:
            notes = (
                f"this is {found.title}, as {found.reason} tells: conch config shows the defaults that "
                f"follow, and --platform=none ignores it",
            )
        defaults = {key: (each.texts, each.reason) for key, each in found.defaults.items()}
        return Detected(found.title, defaults, notes, found.warnings)

    def check(self, settings: Settings) -> None:
        """Checks the ports of REST, gRPC, metrics and Vertex AI; console and control port may be anywhere.

        Raises:
            FlagError: One is out of SageMaker's safe range.
        """
        safe = self.sagemaker.safe_ports
        if safe is None:
            return
        for name, switch in _SAFE_PORTS.items():
            if settings[switch] and settings[name] not in safe:
                raise FlagError(
                    f"--{name}: {settings[name]} is not in the safe port range of SageMaker, {safe}"
                )

    def add_to(self, options: PartOptions, settings: Settings) -> PartOptions:
        """Adds Azure ML's paths to the REST port, and the ports of SageMaker and Vertex AI."""
        options = replace(options, http=self.azureml.added_to(options.http))
        ports = self._ports(settings)
        loads = settings.is_on(SageMakerSettings) and self.sagemaker.multi_model
        if options.server.access_policy is not None:
            _refuse_policy(filter(None, (options.http, *ports)))
        if loads and options.control.mode != "explicit":
            raise FlagError("--sagemaker-multi-model needs --model-control-mode=explicit")
        if not ports:
            return options
        return replace(options, add_ons={**options.add_ons, "platforms": PlatformOptions(ports, loads)})

    def _ports(self, settings: Settings) -> tuple[HttpOptions, ...]:
        """The ports that are on, with the limits and access rules of REST, whether its port is on or not.

        Raises:
            FlagError: A setting is wrong, or of a platform that is not served.
        """
        rest = replace(
            HttpOptions.from_settings(settings), tls=None, reuse_port=False, cors_origins=frozenset()
        )
        ports = []
        for platform in (self.sagemaker, self.vertex_ai):
            if settings.is_on(type(platform)):
                port = replace(rest, port=platform.port, platform=platform.routes())
                if platform is self.sagemaker and self.sagemaker.inference_type == _SCORING:
                    port = replace(port, further=(FrameSettings.routes(settings),))
                ports.append(port)
            else:
                _refuse_unused(settings, type(platform))
        return tuple(ports)


def _refuse_policy(ports: Iterable[HttpOptions]) -> None:
    """Refuses an access policy beside routes of platforms. Raises FlagError: a port has some."""
    hosts = " and ".join(each.title for each in ports if each.platform is not None)
    if hosts:
        raise FlagError(
            f"--access-policy does not hold for the routes of {hosts}, whose platform decides who may "
            f"call: leave it out, or turn these routes off"
        )


def _refuse_unused(settings: Settings, cls: type[SageMakerSettings | VertexAiSettings]) -> None:
    """Refuses settings of a platform that is not served; Triton's defaults are accepted."""
    for each in settings_of(cls):
        if each.flag != cls.SWITCH.flag and settings[each.name] != each.default:
            raise FlagError(f"{each.flag} needs {cls.SWITCH.flag}")
