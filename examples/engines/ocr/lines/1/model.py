"""Cuts lines of text out of an image, where the detector sees them; boxes are parallel to its sides."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils

TEXT, LEAST_SIDE = 0.3, 3
# The detector marks the middle of a line; boxes grow on each side by this share of area by girth.
GROWTH = 1.6
HEIGHT, LONGEST = 48, 2560
# Widths are rounded up, so that lines of several requests have the same and share a batch.
STEP = 320


def regions(marked: np.ndarray) -> np.ndarray:
    """Boxes (left, top, right, bottom) of the connected regions, the uppermost first."""
    edges = np.diff(np.pad(marked, ((0, 0), (1, 1))).astype(np.int8))
    (rows, lefts), rights = np.nonzero(edges == 1), np.nonzero(edges == -1)[1]
    runs = np.stack([lefts, rows, rights, rows + 1], axis=1)
    # Runs are numbered row by row, so those that one touches in the row above are in sequence.
    row = rows * (marked.shape[1] + 1)
    above = row - marked.shape[1] - 1
    begin = np.searchsorted(row + rights, above + lefts)
    end = np.searchsorted(row + lefts, above + rights, "right")
    parents = list(range(len(runs)))

    def root(run: int) -> int:
        while parents[run] != run:
            run = parents[run]
        return run

    for run in range(len(runs)):
        for touched in range(begin[run], end[run]):
            first, second = sorted((root(run), root(touched)))
            parents[second] = first
    roots, index = np.unique([root(run) for run in parents], return_inverse=True)
    boxes = runs[roots.astype(int)]
    np.minimum.at(boxes[:, :2], index, runs[:, :2])
    np.maximum.at(boxes[:, 2:], index, runs[:, 2:])
    return boxes


def find(chances: np.ndarray) -> np.ndarray:
    """Boxes of lines in a map of chances."""
    boxes = regions(chances > TEXT)
    across, down = (boxes[:, 2:] - boxes[:, :2]).T
    more = np.rint(GROWTH * across * down / (2 * (across + down))).astype(int)
    grown = boxes + more[:, None] * [-1, -1, 1, 1]
    return np.clip(grown, 0, np.tile(chances.shape[::-1], 2))[np.minimum(across, down) >= LEAST_SIDE]


def weights(side: int, length: int) -> np.ndarray:
    """The matrix that resizes `length` pixels to `side`, linearly."""
    reach = max(1.0, length / side)
    at = (np.arange(side, dtype=np.float32) + 0.5) * (length / side) - 0.5
    matrix = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(length, dtype=np.float32)) / reach)
    return matrix / matrix.sum(1, keepdims=True)


def cut(pixels: np.ndarray, box: np.ndarray) -> np.ndarray:
    """A line, as high as the recogniser reads it."""
    line = pixels[:, box[1] : box[3], box[0] : box[2]]
    width = min(LONGEST, max(1, round(line.shape[2] * HEIGHT / line.shape[1])))
    return weights(HEIGHT, line.shape[1]) @ line @ weights(width, line.shape[2]).T


class TritonPythonModel:
    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        inputs = (pb_utils.get_input_tensor_by_name(request, name) for name in ("pixels", "map", "size"))
        pixels, chances, size = (tensor.as_numpy() for tensor in inputs)
        boxes = find(chances[0, 0])
        cuts = [cut(pixels[0], box) for box in boxes]
        widest = max((line.shape[2] for line in cuts), default=1)
        lines = np.zeros((max(1, len(cuts)), 3, HEIGHT, -(-widest // STEP) * STEP), np.float32)
        for number, line in enumerate(cuts):
            lines[number, :, :, : line.shape[2]] = line
        scale = np.tile(size / [pixels.shape[3], pixels.shape[2]], 2)
        boxes = np.rint(boxes * scale).astype(np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("lines", lines), pb_utils.Tensor("boxes", boxes)])
