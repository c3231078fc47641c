"""Classifies tumours that the forest has not seen."""

import argparse
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton


def main(url: str, held_out: Path) -> None:
    """Sends all rows in one request; raises if too many are wrong."""
    with np.load(held_out) as data:
        rows, labels = data["rows"], data["labels"]
    with triton.InferenceServerClient(url) as client:
        given = triton.InferInput("input__0", rows.shape, "FP32")
        given.set_data_from_numpy(rows)
        chances = client.infer("tumours", [given]).as_numpy("output__0").reshape(len(rows), -1)[:, -1]
    right = float(((chances > 0.5) == labels).mean())
    print(f"{len(rows)} tumours, {right:.1%} right")
    assert right > 0.93, "fewer are right than after training"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--held-out", type=Path, default=Path("build/engines/tumours.npz"))
    arguments = parser.parse_args()
    main(arguments.url, arguments.held_out)
