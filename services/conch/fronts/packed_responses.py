"""The core's responses to decoded requests: sent to a front, which encodes them.

Threads and locks: the loop's thread; `keep` runs on any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conch.core.errors import ConchError, without_traceback
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import unsendable
from conch.core.tensor import Tensor
from conch.ipc import codec
from conch.ipc.channel import MOST_INLINE, ChannelClosedError, Kind
from conch.ipc.tensors import BlockTensor, MessageStream, Payload

Pack = Callable[[Sequence[Tensor]], Payload]
"""Packs the outputs of one response, to be sent or discarded; from any thread."""


class PackedResponse:
    """A response to be encoded by a front; it is sent once the model may write to its arrays again.

    Attributes:
        request: The request.
        response: The response, whose outputs the model can't change.
        payload: The outputs, if they travel in a block; what does not send it discards it.
    """

    __slots__ = ("payload", "request", "response")

    def __init__(self, request: InferenceRequest, response: InferenceResponse, pack: Pack) -> None:
        self.request = request
        outputs = response.outputs
        self.payload: Payload | None = None
        if sum(tensor.nbytes for tensor in outputs) > MOST_INLINE:
            self.payload = pack(outputs)
        else:
            response = InferenceResponse(list(map(_kept, outputs)), None, response.parameters)
        self.response = response


def _kept(tensor: Tensor) -> Tensor:
    """A tensor that its model can't change."""
    if tensor.has_data and type(tensor.data) is bytes:
        return tensor
    return tensor.detached(tensor.name)


class ResponseSender:
    """Sends responses, those of a round and one version of a model as one RESPONSES.

    Args:
        stream: The messages.
    """

    def __init__(self, stream: MessageStream) -> None:
        self._stream = stream
        self._models: dict[tuple[str, str], int] = {}
        self._ready: dict[tuple[str, str], list[tuple[int, PackedResponse]]] = {}

    def pack(self, outputs: Sequence[Tensor]) -> Payload:
        """See `Pack`."""
        return self._stream.pack([outputs], passing=BlockTensor)

    def add(self, number: int, message: PackedResponse) -> bool:
        """Adds the response to a call to those of the round; True if it is the first."""
        first = not self._ready
        model = message.request.model
        assert model is not None, "only a request that has been submitted is answered"
        key = model.spec.name, model.version_text
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = []
        ready.append((number, message))
        return first

    def discard(self, message: PackedResponse, closed: bool) -> None:
        """Frees a response that is not sent; `closed`: the stream has been closed."""
        if message.payload is not None:
            self._stream.discard_payload(message.payload)
            if closed:
                self._stream.pool.close()  # the block may have been taken after the end

    def close(self) -> None:
        """Frees the responses that wait."""
        ready, self._ready = self._ready, {}
        for answers in ready.values():
            for _, message in answers:
                self.discard(message, closed=False)

    def flush(
        self, fail: Callable[[int, ConchError], None], sent: Callable[[int], object] = lambda number: None
    ) -> None:
        """Sends the responses of the round.

        Args:
            fail: Called with the number of a call whose response can't be sent, and the error.
            sent: Called with the number of each call whose response is sent.

        Raises:
            ChannelClosedError, OSError: The front can't be reached.
        """
        ready, self._ready = self._ready, {}
        for key, answers in ready.items():
            model = self._models.get(key)
            if model is None:
                model = self._models[key] = len(self._models)
                fields = codec.encode_json({"name": key[0], "version": key[1]})
                self._stream.send(Kind.MODEL, model, fields)
            groups = [[answer] for answer in answers if answer[1].payload is not None]
            if small := [answer for answer in answers if answer[1].payload is None]:
                groups.append(small)
            for group in groups:
                try:
                    self._send(model, group, group[0][1].payload)
                    for number, _ in group:
                        sent(number)
                except (ChannelClosedError, OSError):
                    raise
                except Exception:  # boundary: outputs that models have made
                    for number, message in group:
                        self._send_alone(model, number, message, fail, sent)

    def _send(
        self, model: int, answers: Sequence[tuple[int, PackedResponse]], payload: Payload | None = None
    ) -> None:
        responses = [message.response for _, message in answers]
        texts = [codec.text_of(response) for response in responses]
        if payload is None:
            payload = self._stream.pack([response.outputs for response in responses])
        has_texts = any(texts)
        numbers = [number for number, _ in answers]
        flags = bytes([codec.PRESENT | codec.FINAL]) * len(answers)
        fields = codec.encode_responses(len(answers), flags, has_texts, numbers=numbers)
        self._stream.send(Kind.RESPONSES, model, fields, payload, texts if has_texts else ())

    def _send_alone(
        self,
        model: int,
        number: int,
        message: PackedResponse,
        fail: Callable[[int, ConchError], None],
        sent: Callable[[int], object],
    ) -> None:
        """Sends a response of a round of which one could not be sent."""
        self.discard(message, closed=False)  # of one in a block that was not sent
        try:
            self._send(model, [(number, message)])
            sent(number)
        except ConchError as error:
            fail(number, without_traceback(error))
        except Exception as error:  # boundary: outputs that models have made
            fail(number, unsendable(message.request.model_name, message.response, error))
