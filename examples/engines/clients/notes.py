"""Finds the notes of a chord with one network, served by four engines, and compares their answers."""

import argparse

import numpy as np
import tritonclient.grpc as triton

RATE, SAMPLES = 22_050, 43_844
CHORD = {"A4": 440.0, "C#5": 554.37, "E5": 659.26}
NAMES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")
# Names of the input, and of the output that has the notes: each converter chose its own.
TENSORS = {
    "notes_onnx": ("serving_default_input_2:0", "StatefulPartitionedCall:1"),
    "notes_openvino": ("serving_default_input_2:0", "StatefulPartitionedCall:1"),
    "notes_tflite": ("input_2", "note"),
    "notes_tensorflow": ("input_2", "note"),
}


def main(url: str) -> None:
    """Asks all of them; raises if one hears something else."""
    time = np.arange(SAMPLES) / RATE
    sound = sum(np.sin(2 * np.pi * frequency * time) for frequency in CHORD.values()) / len(CHORD)
    heard = {}
    with triton.InferenceServerClient(url) as client:
        for model, (name, output) in TENSORS.items():
            if not client.is_model_ready(model):
                print(f"{model}: not served")
                continue
            given = triton.InferInput(name, [1, SAMPLES, 1], "FP32")
            given.set_data_from_numpy(sound.astype(np.float32).reshape(1, -1, 1))
            heard[model] = client.infer(model, [given]).as_numpy(output)[0]
            loudest = np.sort(np.argsort(heard[model].mean(0))[-len(CHORD) :]) + 21
            names = [f"{NAMES[key % 12]}{key // 12 - 1}" for key in loudest]
            print(f"{model}: {' '.join(names)}")
            assert names == list(CHORD), f"{model} heard {names}, expected {list(CHORD)}"
    first = heard["notes_onnx"]
    for model, notes in heard.items():
        print(f"{model} differs from notes_onnx by at most {np.abs(notes - first).max():.1e}")
        # TensorFlow's own kernels are less exact than those of oneDNN, which it uses on some processors.
        np.testing.assert_allclose(notes, first, atol=2e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    main(parser.parse_args().url)
