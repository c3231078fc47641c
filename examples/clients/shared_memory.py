"""Adds and subtracts vectors that lie in shared memory of client and server: requests only say where."""

import os

import numpy as np
import tritonclient.utils.shared_memory as shm
from common import TIMEOUT_S, expect, options, run
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput

MODEL = "add_sub_python"
VECTOR = 16 * 4
"""Bytes of a vector."""


def add_sub(client: InferenceServerClient) -> None:
    # The region's name at the server, and its name on this machine; others may run this example too.
    name, key = f"vectors_{os.getpid()}", f"/example_vectors_{os.getpid()}"
    a = np.arange(16, dtype=np.float32).reshape(1, 16)
    b = np.full((1, 16), 3, dtype=np.float32)
    region = shm.create_shared_memory_region(name, key, 4 * VECTOR)
    try:
        client.register_system_shared_memory(name, key, 4 * VECTOR, client_timeout=TIMEOUT_S)
        try:
            shm.set_shared_memory_region(region, [a, b])
            inputs = [InferInput(f"INPUT{place}", [1, 16], "FP32") for place in range(2)]
            outputs = [InferRequestedOutput(f"OUTPUT{place}") for place in range(2)]
            # Inputs first, outputs behind them.
            for place, tensor in enumerate([*inputs, *outputs]):
                tensor.set_shared_memory(name, VECTOR, offset=place * VECTOR)
            result = client.infer(MODEL, inputs, outputs=outputs, client_timeout=TIMEOUT_S)
            carried = sum(len(data) for data in result.get_response().raw_output_contents)
            expect(carried == 0, f"the answer carries {carried} bytes")
            total = shm.get_contents_as_numpy(region, np.float32, [1, 16], 2 * VECTOR)
            difference = shm.get_contents_as_numpy(region, np.float32, [1, 16], 3 * VECTOR)
            expect(np.array_equal(total, a + b), f"OUTPUT0 is {total}, not {a + b}")
            expect(np.array_equal(difference, a - b), f"OUTPUT1 is {difference}, not {a - b}")
            print(f"{4 * VECTOR} bytes in shared memory, none of a tensor in the messages")
            for x, y, s, d in zip(a[0], b[0], total[0], difference[0], strict=True):
                print(f"  {x:3g} + {y:g} = {s:3g}    {x:3g} - {y:g} = {d:3g}")
        finally:
            client.unregister_system_shared_memory(name, client_timeout=TIMEOUT_S)
    finally:
        shm.destroy_shared_memory_region(region)


if __name__ == "__main__":
    args = options(__doc__).parse_args()
    run(args.url, [MODEL], add_sub)
