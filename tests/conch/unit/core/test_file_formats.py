"""Formats of files, by their first bytes."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path

import pytest

from conch.core.file_formats import describe, identify


def archive(**members: bytes) -> bytes:
    """A zip archive; ``__`` in a name stands for a slash, ``_dot_`` for a dot."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, content in members.items():
            # Of a fixed date: contents are ids of tests.
            made.writestr(zipfile.ZipInfo(name.replace("__", "/").replace("_dot_", ".")), content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b"", "empty"),
        (b"\x00\x01\x02 nothing known", None),
        (b"ptrt\x00", "tensorrt"),
        (b"tree\nversion=v4\n", "lightgbm"),
        (b'{"learner":{}}', "xgboost_json"),
        (b"{L\x00\x00", "xgboost_ubj"),
        (b"{$i#i", "xgboost_ubj"),
        (b"binf\x00", "xgboost_binary"),
        (b"\x04\0\0\0\x08\0\0\0\x01\0\0\0", "treelite"),
        (b"CBM1\x00", "catboost"),
        (b"\x1c\0\0\0TFL3\0", "tflite"),
        (b'<?xml version="1.0"?>\n<net name="m">', "openvino_ir"),
        (b"\x08\x08\x12\x07pytorch", "onnx"),
        (b"\x0f\0\0\0\0\0\0\0" + json.dumps({"a": 12345678}).encode(), "safetensors"),
        (pickle.dumps([1]), "pickle"),
        (b"version https://git-lfs.github.com/spec/v1\n", "lfs_pointer"),
        (b"\n<!DOCTYPE html>", "html"),
        (b"\x89HDF\r\n\x1a\n", "hdf5"),
        (
            archive(m__constants_dot_pkl=b"", m__code__x_dot_py=b"", m__data_dot_pkl=b""),
            "torchscript",
        ),
        (archive(m__data_dot_pkl=b"", m__version=b"3"), "torch_save"),
        (archive(e__models__model_dot_json=b"{}"), "exported_program"),
        (archive(a__data__aotinductor__model__x_dot_so=b""), "aot_inductor"),
        (archive(schema_dot_json=b'{"__module__": "sklearn"}'), "skops"),
        (archive(readme=b"hello"), "archive"),
        (archive(readme=b"hello")[:40], None),
    ],
)
def test_formats(tmp_path: Path, content: bytes, key: str | None) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    found = identify(path)
    assert (None if found is None else found.key) == key


def test_an_archive_that_no_library_reads(tmp_path: Path) -> None:
    damaged = bytearray(archive(a=b"x"))
    damaged[damaged.index(b"PK\x01\x02") + 6] = 81  # the version of zip that it needs
    path = tmp_path / "model.bin"
    path.write_bytes(damaged)
    assert identify(path) is None


def test_folders_and_what_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "model.savedmodel").mkdir()
    assert describe(tmp_path / "model.savedmodel") == ""
    (tmp_path / "model.savedmodel" / "saved_model.pb").write_bytes(b"")
    assert describe(tmp_path / "model.savedmodel").startswith("is a TensorFlow SavedModel; backend")
    assert describe(tmp_path / "missing") == ""
