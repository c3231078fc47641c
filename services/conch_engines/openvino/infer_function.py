"""Runs one instance of an OpenVINO model: an infer request with its tensors.

Runs that take long are started and completed by OpenVINO's callback, on a thread of its streams. Short ones
run on the thread that starts them: waking another thread takes longer than they do.

OpenVINO does not call back for a run that failed; `FailureWatch` finds these.

Small inputs are copied to a tensor that the request keeps; large ones are used where they are. Outputs are
copied, as the next run overwrites the request's memory, or written to memory of the client.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from conch.backends.arrays import ArrayResults, OnResults
from conch.backends.gather import ARRAY_DTYPES
from conch.core.clock import monotonic_ns
from conch.core.execution.runner import FAST_NS
from conch.core.tensor import Array
from conch_engines.openvino.openvino_engine import engine_error, raise_engine_error

_RUNNING = "running inference"

_WATCH_S = 0.05
"""Seconds between two checks for failed runs."""

_IDLE_ROUNDS = 20
"""Rounds without runs after which the watch sleeps."""

_SMALL_BYTES = 16 * 1024
"""Largest input, in bytes, that is copied: to make a tensor around its memory takes longer."""

_CLOSE_S = 0.0005
_MOST_CLOSE_NS = 5 * 10**9


class InferFunction:
    """An `AsyncArrayFunction`: one infer request.

    Args:
        ov: The `openvino` package.
        request: The infer request.
        inputs: The inputs by name.
        outputs: The outputs by name.
        watch: Finds runs that failed.
    """

    def __init__(
        self,
        ov: Any,
        request: Any,
        inputs: Mapping[str, InputTensor],
        outputs: Mapping[str, OutputTensor],
        watch: FailureWatch,
    ) -> None:
        self._request = request
        self._inputs = inputs
        self._outputs = outputs
        self._watch = watch
        # The methods of the class itself convert arrays, which takes as long as a small model.
        base = ov.InferRequest.__base__
        self._infer, self._start_async = base.infer, base.start_async
        self._done: OnResults | None = None  # of a started run
        self._wanted: tuple[str, ...] = ()
        self._lent: list[InputTensor | OutputTensor] = []  # what has memory of others for the run
        self._started_ns = 0
        self._short = False
        # OpenVINO would convert strings in place to arrays that nothing needs, with a warning.
        self._may_be_short = not any(output.is_text for output in outputs.values())
        on_completed = self._on_completed

        def callback(_: object) -> None:
            on_completed()

        self._callback = weakref.ref(callback)
        request.set_callback(callback, None)
        watch.add(self)

    def start(
        self,
        inputs: dict[str, Array],
        outputs: tuple[str, ...],
        places: Mapping[str, Array] | None,
        done: OnResults,
    ) -> ArrayResults | None:
        """Runs the model once."""
        self._wanted = outputs
        try:
            for name, array in inputs.items():
                tensor = self._inputs[name]
                if tensor.set(array):
                    self._lent.append(tensor)
            if places is not None:
                for name, place in places.items():
                    self._outputs[name].write_to(place)
                    self._lent.append(self._outputs[name])
            self._started_ns = monotonic_ns()
            if self._short:
                values = self._infer(self._request, {}, True, False).values()
                return self._results(list(values))
            self._done = done
            self._start_async(self._request, {}, None)
        except Exception as error:  # of the engine
            self._done = None
            self._let_go()
            raise_engine_error(_RUNNING, error)
        if not self._watch.awake:
            self._watch.wake()
        return None

    @property
    def running(self) -> bool:
        """True if a run is started and not completed."""
        return self._done is not None

    def check(self) -> None:
        """Completes a run that failed; called by the watch."""
        try:
            self._request.wait_for(0)
        except Exception as error:  # of the engine
            done, self._done = self._done, None
            if done is not None:
                self._let_go()
                done(engine_error(_RUNNING, error))

    def close(self) -> None:
        """Frees the request once OpenVINO's threads need the interpreter's lock no more.

        1. The last callback of a stream's thread has completed its batch, and the model is closed.
        2. The thread drops the callback, which takes the lock if nothing else refers to it.
        3. The compiled model goes; it holds the lock and waits for the thread to end.

        So 3 must not come before 2.
        """
        self._watch.remove(self)
        request = self._request
        try:
            request.wait()
        except Exception:  # of the engine, about the last run, which is complete
            pass
        request.set_callback(_ignore, None)
        end_ns = monotonic_ns() + _MOST_CLOSE_NS
        # Polled, as an event at the callback's end would be set before the thread is through with it.
        pause = threading.Event()
        while self._callback() is not None and monotonic_ns() < end_ns:
            pause.wait(_CLOSE_S)
        del self._request, self._inputs, self._outputs

    def _on_completed(self) -> None:
        """OpenVINO's callback."""
        done, self._done = self._done, None
        if done is None:
            return
        results: ArrayResults | BaseException
        try:
            results = self._results()
        except Exception as error:  # top of a thread of the engine
            results = engine_error(_RUNNING, error)
        done(results)

    def _results(self, values: list[Array] | None = None) -> ArrayResults:
        """Copies the outputs, as the next run overwrites their memory."""
        self._short = self._may_be_short and monotonic_ns() - self._started_ns < FAST_NS
        try:
            outputs = self._outputs
            return {name: outputs[name].read(values) for name in self._wanted}
        finally:
            if self._lent:
                self._let_go()

    def _let_go(self) -> None:
        """Drops the memory of requests and clients."""
        for tensor in self._lent:
            tensor.let_go()
        self._lent.clear()


class FailureWatch:
    """Completes runs that failed, which OpenVINO does not call back for.

    Its thread starts with the first run. It looks at the runs every `_WATCH_S` while there are some, and
    sleeps otherwise.

    Args:
        name: The model's name, for the thread.

    Attributes:
        awake: True if the thread checks runs; else it sleeps.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()  # guards all but `awake`, which runs read without it
        self._functions: list[InferFunction] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self.awake = False

    def add(self, function: InferFunction) -> None:
        """Looks at the runs of an instance from now on."""
        with self._changed:
            self._functions.append(function)

    def remove(self, function: InferFunction) -> None:
        """Looks at them no more."""
        with self._changed:
            self._functions.remove(function)

    def wake(self) -> None:
        """Has the thread look at runs; called after a run has started while it sleeps."""
        with self._changed:
            self.awake = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._look, name=f"conch-{self._name}-watch", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread; called when nothing runs."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        idle = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, _WATCH_S)
                while not (self._closed or self.awake):
                    self._changed.wait()
                if self._closed:
                    return
                running = [function for function in self._functions if function.running]
                idle = 0 if running else idle + 1
                if idle > _IDLE_ROUNDS:
                    # A run that starts now either reads this or is seen here.
                    self.awake = False
                    self.awake = any(function.running for function in self._functions)
            for function in running:
                function.check()


def _ignore(_: object) -> None:
    """Called back by no run: the instance is closed."""


class InputTensor:
    """One input of an infer request.

    Args:
        ov: The `openvino` package.
        request: The infer request.
        index: The input's index.
        datatype: Its datatype.
        scalar: The config's dims, all of them 1, where the model has a scalar; else empty.
    """

    __slots__ = (
        "_array",
        "_index",
        "_is_text",
        "_kept",
        "_lent",
        "_make",
        "_request",
        "_scalar",
        "_shape",
        "_type",
    )

    def __init__(self, ov: Any, request: Any, index: int, datatype: str, scalar: tuple[int, ...]) -> None:
        self._make = ov.Tensor
        self._request = request
        self._index = index
        self._kept = request.get_input_tensor(index)
        self._type = self._kept.get_element_type()
        self._scalar = scalar
        self._is_text = datatype == "BYTES"
        self._lent: Any = None  # keeps the array alive, which the request does not
        self._shape: tuple[int, ...] | None = None
        self._array: Array = np.empty(0, ARRAY_DTYPES[datatype])

    def set(self, array: Array) -> bool:
        """Sets the value; True if the array itself is used, until `let_go`."""
        if self._scalar:
            array = array.reshape(())
        if self._is_text:
            # Of arrays OpenVINO takes fixed-length strings only.
            tensor = self._make([bytes(element) for element in array.flat] or [b""])
            tensor.set_shape(array.shape)
            self._request.set_input_tensor(self._index, tensor)
        elif array.nbytes > _SMALL_BYTES:
            # Unlike others, this constructor accepts read-only memory.
            tensor = self._make(np.ascontiguousarray(array), array.shape, self._type)
            self._request.set_input_tensor(self._index, tensor)
            self._shape, self._lent = None, tensor
            return True
        else:
            if array.shape != self._shape:
                self._keep(array.shape)
            self._array[...] = array
        return False

    def let_go(self) -> None:
        """Drops the array of the last run."""
        self._request.set_input_tensor(self._index, self._kept)
        self._lent = None

    def _keep(self, shape: tuple[int, ...]) -> None:
        """Makes the request's own tensor for a shape."""
        self._kept = self._make(self._type, shape)
        self._request.set_input_tensor(self._index, self._kept)
        self._array = self._kept.data.view(self._array.dtype)  # BF16, which numpy lacks, comes as FP16
        self._shape = shape


class OutputTensor:
    """One output of an infer request.

    Attributes:
        is_text: True if its elements are strings.
    """

    __slots__ = ("_dtype", "_index", "_kept", "_make", "_place", "_request", "_scalar", "_type", "is_text")

    def __init__(self, ov: Any, request: Any, index: int, datatype: str, scalar: tuple[int, ...]) -> None:
        self._make = ov.Tensor
        self._request = request
        self._index = index
        self._kept = request.get_output_tensor(index)
        self._type = self._kept.get_element_type()
        self._dtype = ARRAY_DTYPES[datatype]
        self._scalar = scalar
        self._place: Array | None = None
        self.is_text = datatype == "BYTES"

    def write_to(self, place: Array) -> None:
        """Has the next run write to an array, until `let_go`."""
        shape = () if self._scalar else place.shape
        self._request.set_output_tensor(self._index, self._make(place, shape, self._type))
        self._place = place  # keeps it alive, which the request does not

    def read(self, values: list[Array] | None) -> Array:
        """The value as an array of its own, or its place; `values` are all outputs, None asks the request."""
        if self.is_text:
            elements: Array = self._request.get_output_tensor(self._index).bytes_data.astype(object)
            return elements
        index = self._index
        array = self._request.get_output_tensor(index).data if values is None else values[index]
        place = self._place
        if place is not None and (self._scalar or array.shape == place.shape):
            return place
        array = array.copy()
        return array if array.dtype == self._dtype else array.view(self._dtype)

    def let_go(self) -> None:
        """Drops the place of the last run."""
        self._place = None
        self._request.set_output_tensor(self._index, self._kept)
