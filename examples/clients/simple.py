"""Adds and subtracts two vectors, with the ONNX model and with the Python model."""

import numpy as np
from common import TIMEOUT_S, expect, options, run, tensor
from tritonclient.grpc import InferenceServerClient

MODELS = {"simple": np.int32, "add_sub_python": np.float32}


def add_sub(client: InferenceServerClient) -> None:
    for model, dtype in MODELS.items():
        a = np.arange(16, dtype=dtype).reshape(1, 16)
        b = np.full((1, 16), 3, dtype=dtype)
        inputs = [tensor("INPUT0", a), tensor("INPUT1", b)]
        result = client.infer(model, inputs, client_timeout=TIMEOUT_S)
        total, difference = result.as_numpy("OUTPUT0"), result.as_numpy("OUTPUT1")
        expect(np.array_equal(total, a + b), f"{model}: OUTPUT0 is {total}, not {a + b}")
        expect(np.array_equal(difference, a - b), f"{model}: OUTPUT1 is {difference}, not {a - b}")
        print(model)
        for x, y, s, d in zip(a[0], b[0], total[0], difference[0], strict=True):
            print(f"  {x:3g} + {y:g} = {s:3g}    {x:3g} - {y:g} = {d:3g}")


if __name__ == "__main__":
    args = options(__doc__).parse_args()
    run(args.url, list(MODELS), add_sub)
