"""Many requests side by side, results in their order; those of a file with one JSON object a line."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from conch_tools.infer.client import CallError, InferClient, InferRequest, InferResponse
from conch_tools.infer.display import as_json
from conch_tools.infer.inference import RemoteModel
from conch_tools.infer.input_values import InputError, read_json

T = TypeVar("T")

_READ_AHEAD = 4
"""Requests that have been read or wait to be written, for each worker."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_FIELDS = frozenset(("id", "inputs", "outputs", "parameters"))
_INPUT_FIELDS = frozenset(("name", "shape", "datatype", "data"))


@dataclass(frozen=True, slots=True)
class BulkResult:
    """Result of a run.

    Attributes:
        requests: Requests that have a result.
        failed: Requests whose result is an error.
        seconds: Length of the run.
    """

    requests: int
    failed: int
    seconds: float


class BulkInterrupted(Exception):
    """The run was interrupted; `result` is that of the requests before."""

    def __init__(self, result: BulkResult) -> None:
        super().__init__("interrupted")
        self.result = result


def run_bulk(
    model: RemoteModel,
    lines: Iterable[str],
    write: Callable[[str], object],
    *,
    workers: int = 10,
    retries: int = 3,
    parameters: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
) -> BulkResult:
    """Sends a request for each line, and writes a line of JSON for each result, in their order.

    A request is Triton's JSON over HTTP, or an object of values by input. A result is the response, or
    ``{"responses": [...]}`` of a decoupled model, or ``{"error": ..., "line": ...}``; an error does not end
    the run.

    Args:
        model: The model.
        lines: The requests; empty lines are left out.
        write: Takes the results, from one thread at a time.
        workers: Requests in flight.
        retries: Number of times that a request is sent again if the server is unreachable or too busy.
        parameters: Parameters of requests that have none of these names.
        timeout_s: Time limit of a request; None for no limit.

    Raises:
        BulkInterrupted: At a KeyboardInterrupt, after what was in flight has been given up.
        OSError: `write` has raised it.
    """
    began = time.monotonic()
    sender = Sender(model, retries)
    reader = _LineReader(model, sender, parameters or {}, timeout_s)
    requests = failed = 0

    def take(result: dict[str, Any]) -> None:
        nonlocal requests, failed
        write(json.dumps(result, ensure_ascii=False) + "\n")
        requests += 1
        failed += "error" in result

    jobs = (partial(reader.result, number, line) for number, line in enumerate(lines, 1) if line.strip())
    try:
        run_in_order(jobs, take, workers, sender)
    except KeyboardInterrupt:
        raise BulkInterrupted(BulkResult(requests, failed, time.monotonic() - began)) from None
    return BulkResult(requests, failed, time.monotonic() - began)


def run_in_order(
    jobs: Iterable[Callable[[], T]], take: Callable[[T], object], workers: int, sender: Sender
) -> None:
    """Runs jobs on threads, and takes their results in order, each as soon as those before are taken.

    Args:
        jobs: The jobs; so many more than workers are asked for ahead that memory stays bounded.
        take: Takes a result, on one thread at a time.
        workers: Number of threads.
        sender: Sends the requests of the jobs; is closed at the end, and at a KeyboardInterrupt at once.

    Raises:
        Exception: The first that a job or `take` has raised, or that of the jobs after all before were taken.
    """
    results = _OrderedResults(take, workers * _READ_AHEAD)
    executor = ThreadPoolExecutor(workers, "conch-infer")
    try:
        for job in jobs:
            results.wait_for_room()
            if results.error is not None:
                break
            results.add(executor.submit(job))
        executor.shutdown(cancel_futures=results.error is not None)
    except KeyboardInterrupt:
        sender.close()
        executor.shutdown(cancel_futures=True)
        raise
    finally:
        executor.shutdown()
        sender.close()
    if results.error is not None:
        raise results.error


class _OrderedResults(Generic[T]):
    """Takes results in the order of their jobs, as soon as those before are taken."""

    def __init__(self, take: Callable[[T], object], most: int) -> None:
        self._take = take
        self._room = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._pending: deque[Future[T]] = deque()
        self.error: Exception | None = None

    def wait_for_room(self) -> None:
        self._room.acquire()

    def add(self, future: Future[T]) -> None:
        with self._lock:
            self._pending.append(future)
        future.add_done_callback(self._drain)

    def _drain(self, done: Future[T]) -> None:
        with self._lock:
            while self._pending and self._pending[0].done():
                future = self._pending.popleft()
                self._room.release()
                if future.cancelled() or self.error is not None:
                    continue
                try:
                    self._take(future.result())
                except Exception as error:  # raised by the thread that has the jobs
                    self.error = error


class Sender:
    """Sends requests; each thread has a connection.

    Args:
        model: The model.
        retries: Number of times that a request is sent again if the server is unreachable or too busy.
    """

    def __init__(self, model: RemoteModel, retries: int) -> None:
        self._model = model
        self._retries = retries
        self._own = threading.local()
        self._lock = threading.Lock()
        self._clients: list[InferClient] = []
        self._closed = threading.Event()

    def close(self) -> None:
        """Gives up what is in flight."""
        self._closed.set()
        with self._lock:
            for client in self._clients:
                client.close()
            self._clients.clear()

    def send(self, request: InferRequest) -> list[InferResponse]:
        """The responses to a request. Raises CallError: the last attempt failed."""
        for attempt in range(self._retries + 1):
            try:
                client = self._client()
                if self._model.signature.decoupled:
                    return list(client.stream(request))
                return [client.infer(request)]
            except CallError as error:
                pause = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S) * random.uniform(0.5, 1)
                if not error.passing or attempt == self._retries or self._closed.wait(pause):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _client(self) -> InferClient:
        client: InferClient | None = getattr(self._own, "client", None)
        if client is None:
            client = self._own.client = self._model.connect()
            with self._lock:
                self._clients.append(client)
                if self._closed.is_set():
                    client.close()
        return client


class _LineReader:
    """Makes results of lines."""

    def __init__(
        self, model: RemoteModel, sender: Sender, parameters: Mapping[str, Any], timeout_s: float | None
    ) -> None:
        self._model = model
        self._sender = sender
        self._parameters = parameters
        self._timeout_s = timeout_s

    def result(self, number: int, line: str) -> dict[str, Any]:
        where: dict[str, Any] = {"line": number}
        try:
            request = self._request(line, where)
            responses = list(map(as_json, self._sender.send(request)))
        except (InputError, CallError) as error:
            return {"error": str(error), **where}
        if not self._model.signature.decoupled:
            return responses[0]
        return {"id": request.id, "responses": responses} if request.id else {"responses": responses}

    def _request(self, line: str, where: dict[str, Any]) -> InferRequest:
        try:
            entry = read_json(line)
        except ValueError as error:
            raise InputError(f"the line is not JSON: {error}") from None
        if not isinstance(entry, dict):
            raise InputError("the line is no JSON object")
        if not _is_request(entry):
            return self._model.request(entry, parameters=self._parameters, timeout_s=self._timeout_s)
        if "id" in entry:
            where["id"] = entry["id"]
        _check_fields("the request", entry, _FIELDS)
        names, classes = _outputs(entry.get("outputs", []))
        parameters = entry.get("parameters", {})
        if not isinstance(parameters, dict):
            raise InputError("'parameters' is no object")
        return self._model.request(
            self._values(entry["inputs"]),
            outputs=names,
            classes=classes,
            parameters={**self._parameters, **parameters},
            request_id=str(entry.get("id", "")),
            timeout_s=self._timeout_s,
        )

    def _values(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        datatypes = {rule.name: rule.datatype for rule in self._model.signature.inputs}
        values = {}
        for each in inputs:
            name = str(each["name"])
            _check_fields(f"input '{name}'", each, _INPUT_FIELDS)
            if "data" not in each:
                raise InputError(f"input '{name}' has no 'data'")
            if each.get("datatype", datatypes.get(name)) != datatypes.get(name) and name in datatypes:
                raise InputError(f"input '{name}' is {datatypes[name]}, not {each['datatype']}")
            shape = {"shape": each["shape"]} if "shape" in each else {}
            values[name] = {"content": each["data"], **shape}
        return values


def _is_request(entry: Mapping[str, Any]) -> bool:
    """True if a line is a request as over HTTP; else it has values by input."""
    inputs = entry.get("inputs")
    return isinstance(inputs, list) and all(isinstance(each, dict) and "name" in each for each in inputs)


def _check_fields(where: str, found: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = sorted(set(found) - known)
    if unknown:
        raise InputError(f"{where} has '{unknown[0]}'; known are {', '.join(sorted(known))}")


def _outputs(found: Any) -> tuple[list[str], int]:
    """Names of outputs, and the number of classes that they have in common."""
    if not isinstance(found, list) or not all(isinstance(each, dict) and "name" in each for each in found):
        raise InputError("'outputs' is no list of objects with 'name'")
    counts = set()
    for each in found:
        _check_fields(f"output '{each['name']}'", each, frozenset(("name", "parameters")))
        parameters = each.get("parameters", {})
        if not isinstance(parameters, dict):
            raise InputError(f"'parameters' of output '{each['name']}' is no object")
        _check_fields(f"output '{each['name']}'", parameters, frozenset(("binary_data", "classification")))
        count = parameters.get("classification", 0)
        if type(count) is not int or not 0 <= count < 2**31:
            raise InputError(f"'classification' of output '{each['name']}' is no number of classes")
        counts.add(count)
    if len(counts) > 1:
        raise InputError("all outputs of a request have the same 'classification'")
    return [str(each["name"]) for each in found], counts.pop() if counts else 0
