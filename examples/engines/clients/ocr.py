"""Reads text: that of a picture which is drawn here, or of an image file."""

import argparse
import io
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from PIL import Image, ImageDraw, ImageFont

SIZE = (800, 360)
# Place, height of the letters, colour and text.
LINES = [
    (40, 30, 44, "black", "Every engine, one server"),
    (60, 140, 28, "navy", "Invoice 2041 of 7 May"),
    (480, 200, 28, "darkred", "Total: 17.50 EUR"),
    (40, 250, 20, "dimgray", "Hello, bookkeeper: 3 + 4 = 7"),
]
Found = list[tuple[str, list[int], float]]


def main(url: str, image: Path | None) -> None:
    """Reads the image, or else raises if the drawn text and the text read differ."""
    with triton.InferenceServerClient(url) as client:
        if image is not None:
            show(read(client, image.read_bytes()))
            return
        found = read(client, draw(LINES))
        show(found)
        assert [text for text, _, _ in found] == [text for *_, text in LINES], "other text was drawn"
        for (_, (left, top, right, bottom), _), (x, y, height, *_) in zip(found, LINES, strict=True):
            assert left <= x + 5 < right and top <= y + height / 2 < bottom, f"text was drawn at {x}, {y}"
        nothing = read(client, draw([]))
        print(f"a blank picture: {len(nothing)} lines")
        assert not nothing, "there is no text in it"


def draw(lines: list[tuple[int, int, int, str, str]]) -> bytes:
    """A PNG file with these lines."""
    image = Image.new("RGB", SIZE, "white")
    for x, y, height, colour, text in lines:
        ImageDraw.Draw(image).text((x, y), text, fill=colour, font=ImageFont.load_default(height))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def read(client: triton.InferenceServerClient, file: bytes) -> Found:
    """Text, box (left, top, right, bottom) and score of each line."""
    given = triton.InferInput("file", [1], "BYTES")
    given.set_data_from_numpy(np.array([file], np.object_))
    result = client.infer("ocr", [given])
    texts, boxes, scores = (result.as_numpy(name).tolist() for name in ("text", "box", "score"))
    return [(text.decode(), box, score) for text, box, score in zip(texts, boxes, scores, strict=True)]


def show(found: Found) -> None:
    for text, box, score in found:
        print(f"{score:.2f} at {', '.join(map(str, box))}: {text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--image", type=Path, help="a PNG or JPEG file to read")
    arguments = parser.parse_args()
    main(arguments.url, arguments.image)
