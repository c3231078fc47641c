"""Finds speech in a recording that is sent piece by piece; the server keeps the state of the sequence."""

import argparse
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

RATE, PIECE, BEFORE = 8000, 256, 32


def main(url: str, recording: Path) -> None:
    """Sends the recording as one sequence, and backwards as another one beside it; prints what is found."""
    sound = np.fromfile(recording, "<i2").astype(np.float32) / 32768
    with triton.InferenceServerClient(url) as client:
        forwards = [piece for piece in pieces(sound)]
        backwards = [piece for piece in pieces(sound[::-1].copy())]
        found: dict[int, list[float]] = {1: [], 2: []}
        for number, both in enumerate(zip(forwards, backwards, strict=True)):
            for sequence, piece in enumerate(both, 1):
                last = number == len(forwards) - 1
                found[sequence].append(ask(client, piece, sequence, number == 0, last))
    for sequence, chances in found.items():
        print(f"sequence {sequence}: {''.join('#' if chance > 0.5 else '.' for chance in chances)}")
    speech = [chance > 0.5 for chance in found[1]]
    assert 0.3 < sum(speech) / len(speech) < 0.8, "about half of the recording is speech"
    assert not speech[0] and not speech[-1], "it begins and ends with silence"


def pieces(sound: np.ndarray) -> list[np.ndarray]:
    """Pieces of 32 ms, each with the 4 ms before it."""
    padded = np.concatenate([np.zeros(BEFORE, np.float32), sound])
    count = len(sound) // PIECE
    return [padded[n * PIECE : (n + 1) * PIECE + BEFORE].reshape(1, -1) for n in range(count)]


def ask(
    client: triton.InferenceServerClient, piece: np.ndarray, sequence: int, first: bool, last: bool
) -> float:
    """The chance of speech in a piece."""
    sound = triton.InferInput("input", piece.shape, "FP32")
    sound.set_data_from_numpy(piece)
    rate = triton.InferInput("sr", [1], "INT64")
    rate.set_data_from_numpy(np.array([RATE], np.int64))
    result = client.infer(
        "voice_activity",
        [sound, rate],
        sequence_id=sequence,
        sequence_start=first,
        sequence_end=last,
    )
    return float(result.as_numpy("output")[0, 0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--recording", type=Path, default=Path("build/engines/speech_8khz.raw"))
    given = parser.parse_args()
    main(given.url, given.recording)
