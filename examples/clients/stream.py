"""Sends many requests over one bidirectional stream and matches the answers by request id."""

import queue

import numpy as np
from common import TIMEOUT_S, WrongAnswer, expect, options, run, tensor
from tritonclient.grpc import InferenceServerClient, InferResult
from tritonclient.utils import InferenceServerException

MODEL = "add_sub_python"


def stream(client: InferenceServerClient, count: int) -> None:
    answers: queue.SimpleQueue[tuple[InferResult | None, InferenceServerException | None]]
    answers = queue.SimpleQueue()
    waiting: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    # The callback runs on the client's reader thread: it only queues answers, so reading never stalls.
    client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=TIMEOUT_S)
    try:
        for i in range(count):
            a = np.full((1, 16), i, dtype=np.float32)
            b = np.arange(16, dtype=np.float32).reshape(1, 16)
            waiting[str(i)] = (a, b)
            client.async_stream_infer(MODEL, [tensor("INPUT0", a), tensor("INPUT1", b)], request_id=str(i))
        while waiting:
            try:
                result, error = answers.get(timeout=TIMEOUT_S)
            except queue.Empty:
                raise WrongAnswer(f"{len(waiting)} requests got no answer in {TIMEOUT_S:g} s") from None
            if result is None:
                raise error or WrongAnswer("a message with neither a result nor an error")
            request_id = result.get_response().id
            expect(request_id in waiting, f"an answer for request '{request_id}', which is not waiting")
            a, b = waiting.pop(request_id)
            expect(np.array_equal(result.as_numpy("OUTPUT0"), a + b), f"request {request_id}: wrong sum")
            expect(
                np.array_equal(result.as_numpy("OUTPUT1"), a - b), f"request {request_id}: wrong difference"
            )
    finally:
        # After a failure the rest of the answers is of no use: do not wait for them.
        client.stop_stream(cancel_requests=bool(waiting))
    print(f"{count} requests over one stream, every answer right")


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--count", type=int, default=100, help="requests to send")
    args = parser.parse_args()
    run(args.url, [MODEL], lambda client: stream(client, args.count))
