"""Wire form of the ModelControl service: messages of `agent_api`'s classes, bearer tokens, error statuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import grpc

from conch.core.errors import (
    ERRORS_BY_CODE,
    CancelledError,
    ConchError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
    status_details,
)
from conch.core.model_control import LoadParameter
from conch.core.rollouts import RolloutReport, RolloutSide, RolloutTransition
from conch.protocol import model_control_pb2 as pb
from conch_control.agent_api import Index, InstanceStatus, ModelDescription, ModelStatus, VersionStatus
from conch_control.events import Event
from conch_control.managed_rollouts import Counts, ManagedBy, ManagedReport, ManagedVersion
from conch_control.version_phase import Phase

_TO_PHASE: Mapping[Phase, pb.Phase] = {phase: getattr(pb, f"PHASE_{phase.value}") for phase in Phase}
_FROM_PHASE: Mapping[int, Phase] = {number: phase for phase, number in _TO_PHASE.items()}
_INT64 = range(-(2**63), 2**63)


def _text(text: str) -> str:
    # File names may not be valid UTF-8.
    return text.encode(errors="backslashreplace").decode()


def _phase(number: int) -> Phase:
    phase = _FROM_PHASE.get(number)
    if phase is None:
        raise InternalError(f"the server is of a newer version: it knows a phase {number}, which we do not")
    return phase


def event_message(event: Event) -> pb.Event:
    """Event to message."""
    return pb.Event(
        revision=event.revision,
        model=_text(event.model),
        version=event.version,
        phase=_TO_PHASE[event.phase],
        reason=_text(event.reason),
        seconds=event.seconds,
        rollout=None if event.rollout is None else _transition_message(event.rollout),
    )


def event_of(message: pb.Event) -> Event:
    """Message to event. Raises InternalError: its phase is unknown."""
    return Event(
        message.revision,
        message.model,
        message.version,
        _phase(message.phase),
        message.reason,
        message.seconds,
        _transition_of(message.rollout) if message.HasField("rollout") else None,
    )


def _transition_message(transition: RolloutTransition) -> pb.RolloutEvent:
    return pb.RolloutEvent(
        seconds=transition.seconds,
        id=transition.id,
        state=transition.state,
        step=transition.step,
        weight=transition.weight,
        stable=transition.stable,
        candidate=transition.candidate,
        reason=_text(transition.reason),
        called=transition.called,
    )


def _transition_of(message: pb.RolloutEvent) -> RolloutTransition:
    return RolloutTransition(
        message.seconds,
        message.id,
        message.state,
        message.step,
        message.weight,
        _optional(message, "stable"),
        _optional(message, "candidate"),
        message.reason,
        message.called,
    )


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def rollout_message(report: RolloutReport) -> pb.Rollout:
    """Rollout to message."""
    return pb.Rollout(
        model=_text(report.model),
        source=report.source,
        id=report.id,
        state=report.state,
        step=report.step,
        steps=report.steps,
        step_seconds=report.step_seconds,
        seconds=report.seconds,
        weight=report.weight,
        shadow=report.shadow,
        stable=report.stable,
        candidate=report.candidate,
        previous=report.previous,
        result=report.result,
        verdict=_text(report.verdict),
        reason=_text(report.reason),
        note=_text(report.note),
        refused=report.refused,
        sides=[
            pb.RolloutSide(
                version=each.version,
                role=each.role,
                traffic=each.traffic,
                requests=each.requests,
                failures=each.failures,
                p99_ms=each.p99_ms,
            )
            for each in report.sides
        ],
        compared=report.compared,
        mismatched=report.mismatched,
        labels=report.labels,
        declaration_json=json.dumps(report.declaration) if report.declaration else "",
        history=map(_transition_message, report.history),
        managed_by=_text(report.managed_by),
        managed_state_json=report.managed_state,
        shadow_json=json.dumps(report.shadow_report) if report.shadow_report else "",
    )


def rollout_of(message: pb.Rollout) -> RolloutReport:
    """Message to rollout."""
    return RolloutReport(
        message.model,
        message.source,
        message.id,
        message.state,
        message.step,
        tuple(message.steps),
        message.step_seconds,
        message.seconds,
        message.weight,
        message.shadow,
        _optional(message, "stable"),
        _optional(message, "candidate"),
        _optional(message, "previous"),
        message.result,
        message.verdict,
        message.reason,
        message.note,
        tuple(message.refused),
        tuple(
            RolloutSide(
                each.version,
                each.role,
                each.traffic,
                each.requests,
                each.failures,
                _optional(each, "p99_ms"),
            )
            for each in message.sides
        ),
        message.compared,
        message.mismatched,
        dict(message.labels),
        json.loads(message.declaration_json) if message.declaration_json else {},
        tuple(map(_transition_of, message.history)),
        json.loads(message.shadow_json) if message.shadow_json else {},
        message.managed_by,
        message.managed_state_json,
    )


def managed_by_message(managed_by: ManagedBy) -> pb.ManagedBy:
    """A manager's state to message."""
    return pb.ManagedBy(
        manager=managed_by.manager,
        state_json=json.dumps(managed_by.state),
        lease_seconds=managed_by.lease_s,
        files=managed_by.files,
    )


def managed_by_of(message: pb.ManagedBy) -> ManagedBy:
    """Message to a manager's state. Raises InvalidArgumentError: the state is not JSON."""
    try:
        state = json.loads(message.state_json)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"managed_by: state_json is not JSON: {error}") from None
    return ManagedBy(message.manager, state, message.lease_seconds, message.files)


def managed_report_message(report: ManagedReport) -> pb.StartRolloutResponse:
    """A server's answer to its manager to message."""
    return pb.StartRolloutResponse(
        rollout=rollout_message(report.rollout),
        alarm=_text(report.alarm),
        versions=[
            pb.ManagedVersion(
                version=each.version,
                ready=each.ready,
                current=each.current,
                failure=_text(each.failure),
                since_seconds=each.since,
                compared=each.differences is not None,
                differences=map(_text, each.differences or ()),
                counts=_counts_message(each.counts),
                shadows=_counts_message(each.shadows),
                compared_pairs=each.pairs[0],
                mismatched_pairs=each.pairs[1],
            )
            for each in report.versions
        ],
    )


def managed_report_of(message: pb.StartRolloutResponse) -> ManagedReport:
    """Message to a server's answer to its manager."""
    versions = tuple(
        ManagedVersion(
            each.version,
            each.ready,
            each.current,
            each.failure,
            each.since_seconds,
            tuple(each.differences) if each.compared else None,
            _counts_of(each.counts),
            _counts_of(each.shadows),
            (each.compared_pairs, each.mismatched_pairs),
        )
        for each in message.versions
    )
    return ManagedReport(rollout_of(message.rollout), message.alarm, versions)


def _counts_message(counts: Counts) -> pb.VersionCounts:
    return pb.VersionCounts(requests=counts.requests, failures=counts.failures, latencies=counts.latencies)


def _counts_of(message: pb.VersionCounts) -> Counts:
    return Counts(message.requests, message.failures, tuple(message.latencies))


def _version_message(status: VersionStatus) -> pb.VersionStatus:
    return pb.VersionStatus(
        version=status.version,
        phase=_TO_PHASE[status.phase],
        reason=_text(status.reason),
        since_seconds=status.seconds,
        host_bytes=status.host_bytes,
        staged_bytes=status.done_bytes,
        staging_bytes=status.total_bytes,
    )


def _version_of(message: pb.VersionStatus) -> VersionStatus:
    return VersionStatus(
        message.version,
        _phase(message.phase),
        message.reason,
        message.since_seconds,
        message.host_bytes if message.HasField("host_bytes") else None,
        message.staged_bytes,
        message.staging_bytes,
    )


def status_message(status: ModelStatus) -> pb.ModelStatus:
    """Model status to message."""
    return pb.ModelStatus(
        name=_text(status.name),
        location=_text(status.location),
        versions=map(_version_message, status.versions),
        reason=_text(status.reason),
        labels=status.labels,
        rollout=None if status.rollout is None else rollout_message(status.rollout),
    )


def status_of(message: pb.ModelStatus) -> ModelStatus:
    """Message to model status. Raises InternalError: a phase is unknown."""
    versions = tuple(map(_version_of, message.versions))
    rollout = rollout_of(message.rollout) if message.HasField("rollout") else None
    return ModelStatus(
        message.name, message.location, versions, message.reason, dict(message.labels), rollout
    )


def index_message(index: Index) -> pb.ModelIndex:
    """Index to message."""
    return pb.ModelIndex(
        epoch=index.epoch,
        revision=index.revision,
        models=map(status_message, index.models),
        draining=index.draining,
    )


def index_of(message: pb.ModelIndex) -> Index:
    """Message to index. Raises InternalError: a phase is unknown."""
    return Index(message.epoch, message.revision, tuple(map(status_of, message.models)), message.draining)


def description_message(description: ModelDescription) -> pb.ModelDescription:
    """Description to message."""
    return pb.ModelDescription(
        status=status_message(description.status),
        config_json=_text(description.config_json),
        origins={_text(path): _text(origin) for path, origin in description.origins.items()},
        instances=[
            pb.InstanceStatus(group=_text(each.group), kind=each.kind, device=each.device, count=each.count)
            for each in description.instances
        ],
    )


def description_of(message: pb.ModelDescription) -> ModelDescription:
    """Message to description. Raises InternalError: a phase is unknown."""
    instances = tuple(
        InstanceStatus(each.group, each.kind, each.device, each.count) for each in message.instances
    )
    return ModelDescription(status_of(message.status), message.config_json, dict(message.origins), instances)


def load_request(name: str, parameters: Mapping[str, LoadParameter]) -> pb.LoadRequest:
    """Load to message. Raises InvalidArgumentError: a value does not fit."""
    request = pb.LoadRequest(model=_text(name))
    for key, value in parameters.items():
        carried = request.parameters[_text(key)]
        if isinstance(value, bool):  # bool is a subclass of int
            carried.bool_param = value
        elif isinstance(value, int):
            if value not in _INT64:
                raise InvalidArgumentError(f"load parameter '{key}' must fit into 64 bits, got {value}")
            carried.int64_param = value
        elif isinstance(value, str):
            carried.string_param = _text(value)
        else:
            carried.bytes_param = value
    return request


def load_parameters(request: pb.LoadRequest) -> dict[str, LoadParameter]:
    """Parameters of a load message. Raises InvalidArgumentError: one has no value."""
    parameters: dict[str, LoadParameter] = {}
    for key, carried in request.parameters.items():
        kind = carried.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidArgumentError(
                f"load parameter '{key}' has no value: set one of bool_param, int64_param, string_param and "
                "bytes_param"
            )
        parameters[key] = getattr(carried, kind)
    return parameters


AUTHORIZATION = "authorization"
SCHEME = "Bearer "

ERROR_KEY = "conch-error"
"""Trailing metadata with Triton's name of the error code."""

TRANSIENT_KEY = "conch-may-pass"
"""Trailing metadata that marks an error as transient although its code does not."""

STATUSES: Mapping[int, Any] = {status.value[0]: status for status in grpc.StatusCode}
"""gRPC status codes by number."""

_BY_STATUS = {error.grpc_status: error for error in ERRORS_BY_CODE.values()}


class UnreachableError(UnavailableError):
    """No answer: no server, or not a ModelControl server."""


def abort(context: Any, error: ConchError, transient: bool = False) -> None:
    """Ends a call with an error."""
    metadata = ((ERROR_KEY, error.code), (TRANSIENT_KEY, "1"))
    context.set_trailing_metadata(metadata if transient else metadata[:1])
    context.abort(STATUSES[error.grpc_status], status_details(error.message).decode())


def error_of(call: Any, target: str) -> ConchError:
    """The error of a failed call: the agent's, with a cause if transient, or one about the connection."""
    number = call.code().value[0]
    text = call.details() or call.code().name
    metadata = dict(call.trailing_metadata() or ())
    code = metadata.get(ERROR_KEY)
    if code is not None:
        error = ERRORS_BY_CODE.get(code, _BY_STATUS.get(number, InternalError))(text)
        if TRANSIENT_KEY in metadata:
            error.__cause__ = UnavailableError(f"{target} says that another try may succeed")
        return error
    if number == UnavailableError.grpc_status:
        return UnreachableError(f"{target} can't be reached: {text}")
    if number == UnsupportedError.grpc_status:
        return UnsupportedError(f"{target} has no control service: is it the control port?")
    if number == DeadlineExceededError.grpc_status:
        return UnreachableError(f"{target} has not answered in time")
    if number in (
        CancelledError.grpc_status,
        ResourceExhaustedError.grpc_status,
        UnauthenticatedError.grpc_status,
    ):
        return _BY_STATUS[number](text)
    return InternalError(f"{target} has answered as no control service does: {text}")
