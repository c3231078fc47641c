"""The RPCs that read and change the settings of logs and traces."""

from __future__ import annotations

from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.server_core import ServerCore
from conch.frontends.grpc.adapter import UnaryHandler
from conch.frontends.grpc.control import answering
from conch.observability.settings import LogControl, Setting
from conch.observability.trace import TraceSettings
from conch.protocol import inference_pb2 as pb


def settings_handlers(core: ServerCore, logs: LogControl, traces: TraceSettings) -> dict[str, UnaryHandler]:
    """The handlers by method.

    Args:
        core: The server.
        logs: Its log settings.
        traces: Its trace settings.
    """

    def log_settings(request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        settings = logs.update({name: _given(value) for name, value in request.settings.items()})
        return pb.LogSettingsResponse(settings={name: _setting(value) for name, value in settings.items()})

    def trace_setting(request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        name = request.model_name
        if name:
            _check_known(core, name)
        changes = {key: tuple(setting.value) for key, setting in request.settings.items()}
        kind = pb.TraceSettingResponse.SettingValue
        return pb.TraceSettingResponse(
            settings={key: kind(value=value) for key, value in traces.update(changes, name).items()}
        )

    service = "/inference.GRPCInferenceService/"
    return {
        service + "LogSettings": answering(pb.LogSettingsRequest, log_settings),
        service + "TraceSetting": answering(pb.TraceSettingRequest, trace_setting),
    }


def _given(value: pb.LogSettingsRequest.SettingValue) -> Setting | None:
    member = value.WhichOneof("parameter_choice")
    given: Setting | None = None if member is None else getattr(value, member)
    return given


def _setting(value: Setting) -> pb.LogSettingsResponse.SettingValue:
    kind = pb.LogSettingsResponse.SettingValue
    if isinstance(value, bool):
        return kind(bool_param=value)
    return kind(uint32_param=value) if isinstance(value, int) else kind(string_param=value)


def _check_known(core: ServerCore, name: str) -> None:
    try:
        core.model(name)
    except ConchError:
        raise InvalidArgumentError(f"Request for unknown model : {name}") from None
