"""A random language model in a repository, for the backend openvino_genai."""

from __future__ import annotations

from pathlib import Path

from conch_engines.genai.random_model import write_random_model


def random_model(root: Path, name: str = "tiny", **parameters: str) -> Path:
    """Writes the model with its config; returns its directory."""
    directory = root / name
    (directory / "1").mkdir(parents=True)
    write_random_model(directory / "1" / "model.gguf")
    lines = ['backend: "openvino_genai"']
    for key, value in parameters.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    (directory / "config.pbtxt").write_text("\n".join(lines))
    return directory
