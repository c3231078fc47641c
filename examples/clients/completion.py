"""Shows the configuration the server worked out for the models that come without a config.pbtxt."""

import numpy as np
from common import TIMEOUT_S, expect, options, run, tensor
from tritonclient.grpc import InferenceServerClient

MODELS = ["autocomplete_onnx", "strings"]


def show(client: InferenceServerClient) -> None:
    for model in MODELS:
        config = client.get_model_config(model, client_timeout=TIMEOUT_S).config
        print(f"{model}: backend {config.backend}, max_batch_size {config.max_batch_size}")
        expect(len(config.input) > 0 and len(config.output) > 0, f"{model} has no inputs or no outputs")
        for kind, tensors in (("input", config.input), ("output", config.output)):
            for item in tensors:
                dtype = type(item).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
                print(f"  {kind} {item.name}: {dtype[item.data_type].name} {list(item.dims)}")

    celsius = np.array([[-40.0], [0.0], [100.0]], dtype=np.float32)
    result = client.infer(MODELS[0], [tensor("celsius", celsius)], client_timeout=TIMEOUT_S)
    fahrenheit = result.as_numpy("fahrenheit")
    expect(np.allclose(fahrenheit, [[-40.0], [32.0], [212.0]]), f"{celsius} °C came back as {fahrenheit} °F")
    for c, f in zip(celsius[:, 0], fahrenheit[:, 0], strict=True):
        print(f"{c:g} °C = {f:g} °F")


if __name__ == "__main__":
    args = options(__doc__).parse_args()
    run(args.url, MODELS, show)
