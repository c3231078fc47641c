"""conch infer with rows of a file: what it reads and writes, and how it goes on after an error."""

from __future__ import annotations

import io
import json
import os
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tests.support.leaks import local_server

import conch
from conch_frames.csv_table import csv_text
from conch_tools import infer_command
from conch_tools.infer.row_files import RowFileError, RowReader, open_writer, rows_of
from conch_tools.progress_bar import ProgressBar

_TEXTS = ["Köln", "", 'a,\n"b', "null", "007", " x"]


def made(rows: int) -> pd.DataFrame:
    """Rows with each kind of column."""
    random = np.random.default_rng(3)
    frame = pd.DataFrame(
        {
            "whole": random.integers(-(2**62), 2**62, rows),
            "number": random.standard_normal(rows) * 10.0 ** random.integers(-300, 300, rows),
            "city": pd.array(random.choice(_TEXTS, rows), dtype="str"),
            "kind": pd.Categorical(random.choice(["u", "v"], rows), ["v", "u"]),
            "active": random.random(rows) < 0.5,
        }
    )
    frame.loc[::7, "number"] = None
    frame.loc[::5, "city"] = None
    return frame


FRAME = made(2000)


def told(frame: pd.DataFrame) -> pd.DataFrame:
    """All that the function has got of a row, exactly, besides a few plain outputs."""
    rows = frame.astype({"kind": "str"}).astype(object).where(frame.notna(), None)
    texts = [repr([*row]) for row in rows.itertuples(index=False)]
    return pd.DataFrame({"told": texts, "number": frame["number"], "active": frame["active"]})


@pytest.fixture(scope="module")
def server() -> Iterator[conch.Server]:
    """A server with a function of rows."""
    server = conch.Server(grpc_port=0, http_port=0, metrics_port=None, grpc_address="127.0.0.1")
    server.bind("told", told, example=FRAME, config=conch.ModelConfig(max_batch_size=128))

    def picky(frame: pd.DataFrame) -> Any:
        if (frame["x"] == 150).any():
            raise conch.InvalidArgumentError("not this one")
        return frame

    server.bind("picky", picky, example=pd.DataFrame({"x": [1]}), config=conch.ModelConfig(max_batch_size=16))
    spaces = conch.ModelConfig(parameters={"CONCH_COLUMNS": '[{"name": "a_b", "spaces": true}]'})
    tensors = [conch.Tensor("a_b", np.int64, (1,))], [conch.Tensor("twice", np.int64, (1,))]
    server.bind("spaces", conch.batch(lambda a_b: 2 * a_b), *tensors, config=spaces)
    with local_server(), server:
        yield server


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, server: conch.Server) -> str:
    """The server's URL, for each protocol."""
    return str(server.grpc_url if request.param == "grpc" else server.http_url)


def written(path: Path) -> Path:
    """The rows in a file of the format of its ending."""
    plain = FRAME.astype({"kind": "str"}).astype(object).where(FRAME.notna(), None)
    records = plain.to_dict("records")
    if path.suffix == ".jsonl":
        path.write_bytes(b"\n".join(map(orjson.dumps, records)))
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pandas(FRAME), path, row_group_size=300)
    else:
        cells = [["" if each is None else json_text(each) for each in row.values()] for row in records]
        path.write_text("\n".join(map(",".join, [list(FRAME.columns), *cells])) + "\n", newline="")
    return path


def json_text(value: Any) -> str:
    """A cell of CSV; texts in quotes, so that an empty one is not null."""
    return '"' + value.replace('"', '""') + '"' if isinstance(value, str) else repr(value)


def read(path: Path) -> dict[str, list[Any]]:
    """The outputs in a file."""
    if path.suffix == ".parquet":
        found: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
    elif path.suffix == ".jsonl":
        records = list(map(json.loads, path.read_text().splitlines()))
        found = {name: [record[name] for record in records] for name in records[0]}
    else:
        frame = pd.read_csv(path, dtype={"told": "str"}, keep_default_na=False, na_values={"number": [""]})
        found = frame.to_dict("list")
    found["number"] = [None if each is None or np.isnan(each) else each for each in found["number"]]
    return found


def run(capsys: pytest.CaptureFixture[str], url: str, *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command."""
    code = infer_command.run([*map(str, arguments), "-u", url])
    out, errors = capsys.readouterr()
    return code, out, errors


@pytest.mark.parametrize(
    ("source", "target"), [("in.csv", "o.csv"), ("in.jsonl", "o.parquet"), ("in.parquet", "o.jsonl")]
)
def test_each_row_is_answered_exactly(
    url: str, source: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given_file, out = written(tmp_path / source), tmp_path / target
    code, printed, errors = run(capsys, url, "told", "--rows", given_file, "-o", out)
    assert (code, printed) == (0, ""), errors
    assert errors.startswith("2000 rows, ")
    wanted = told(FRAME)
    numbers = [None if np.isnan(each) else each for each in wanted["number"]]
    found = read(out)
    assert found == {"told": wanted["told"].tolist(), "number": numbers, "active": wanted["active"].tolist()}


def test_standard_input_and_output(
    server: conch.Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = written(tmp_path / "in.csv").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    code, out, _ = run(
        capsys, str(server.grpc_url), "told", "--csv", "-", "--output", "active", "--out-format", "jsonl"
    )
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [{"active": each} for each in FRAME["active"]]


@pytest.mark.parametrize("name", ["in.csv", "in.parquet"])
def test_a_file_with_a_header_alone_has_no_rows_to_send(
    server: conch.Server, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / name
    source.write_text("x\n") if name == "in.csv" else pd.DataFrame({"x": np.zeros(0, int)}).to_parquet(source)
    code, out, errors = run(capsys, str(server.grpc_url), "picky", "--rows", source)
    assert (code, out, errors[:7]) == (0, "", "0 rows,")


def test_a_full_disk_ends_a_run_with_a_sentence(
    server: conch.Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.csv"
    source.write_text("x\n1\n")
    code, _, errors = run(capsys, str(server.grpc_url), "picky", "--csv", source, "-o", "/dev/full")
    assert code == infer_command.REFUSED
    assert errors == (
        "conch infer: [Errno 28] No space left on device\n0 rows are written; go on with --start-row 0\n"
    )


def test_infinity_is_no_null_of_json(tmp_path: Path) -> None:
    with (tmp_path / "o").open("wb") as file:
        writer = open_writer(file, "jsonl", True)
        with pytest.raises(RowFileError, match="output 'y' has infinity, which JSON has not: write CSV or"):
            writer.write({"x": np.array([1.0, np.nan]), "y": np.array([1.0, -np.inf])})
    assert (tmp_path / "o").read_bytes() == b""


def test_a_column_has_spaces_where_the_model_s_library_wrote_others(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.csv").write_text("other,a b\n1,5\n")
    code, out, errors = run(capsys, url, "spaces", "--csv", tmp_path / "in.csv")
    assert (code, out) == (0, "twice\n10\n"), errors


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_run_goes_on_from_the_row_that_it_names(
    url: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.csv", tmp_path / f"o.{ending}"
    rows = [str(number) for number in range(300)]
    source.write_text("\n".join(["x", *rows[:77], "many", *rows[78:]]))
    code, _, errors = run(capsys, url, "picky", "--csv", source, "-o", out)
    assert code == infer_command.REFUSED
    assert errors == (
        "conch infer: column 'x', row 77: must have numbers of type INT64, not 'many'\n"
        "77 rows are written; go on with --start-row 77\n"
    )
    source.write_text("\n".join(["x", *rows]))
    code, _, errors = run(capsys, url, "picky", "--csv", source, "-o", out, "--start-row", "70")
    assert code == infer_command.USAGE
    assert "has 77 rows: go on with --start-row 77, or give another file" in errors
    code, _, errors = run(
        capsys, url, "picky", "--csv", source, "-o", out, "--start-row", "77", "--workers", "1"
    )
    assert code == infer_command.REFUSED
    assert errors.splitlines()[0] == "conch infer: rows 141 to 156: not this one"
    assert errors.splitlines()[1] == "141 rows are written; go on with --start-row 141"
    rows[150] = "-150"
    source.write_text("\n".join(["x", *rows]))
    kept = out.read_bytes()
    out.write_bytes(kept.replace(b"x", b"y"))  # of a model with another output
    code, _, errors = run(capsys, url, "picky", "--csv", source, "-o", out, "--start-row", "141")
    assert code == infer_command.REFUSED
    assert errors.startswith("conch infer: the outputs are x, and the rows of the file y: give another file")
    out.write_bytes(kept)
    code, _, errors = run(capsys, url, "picky", "--csv", source, "-o", out, "--start-row", "141")
    assert code == 0, errors
    lines = out.read_text().splitlines()
    found = [json.loads(line)["x"] for line in lines] if ending == "jsonl" else list(map(int, lines[1:]))
    assert found == list(map(int, rows))


@pytest.mark.parametrize(
    ("arguments", "content", "code", "text"),
    [
        (
            ["--rows", "FILE.txt"],
            "",
            2,
            "has none of the endings .csv, .jsonl, .ndjson, .parquet: give --format",
        ),
        (["--rows", "-"], "", 2, "standard input has none of the endings"),
        (["--rows", "-", "--format", "parquet"], "", 2, "Parquet is read from its end on"),
        (["--csv", "FILE", "--format", "csv"], "x\n1\n", 2, "--csv is --rows with --format csv: give one"),
        (["--csv", "FILE", "-i", "x=1"], "x\n1\n", 2, "-i is of one request, and a file of rows has many"),
        (["--csv", "FILE", "-o", "FILE"], "x\n1\n", 2, "is the file of the rows"),
        (["--csv", "FILE", "--output", "y"], "x\n1\n", 2, "model 'picky' has no output 'y'; it has x"),
        (["-i", "x=1", "--start-row", "1"], "", 2, "--start-row goes with --rows or --csv"),
        (["--csv", "FILE"], "", 1, "the table: it is empty: CSV begins with a line of column names"),
        (["--csv", "FILE"], "y\n1\n", 1, "column 'x': model 'picky' needs it, and the table has 'y'"),
        (["--rows", "FILE", "--format", "jsonl"], '{"y": 1}', 1, "column 'x': model 'picky' needs it"),
        (["--csv", "FILE"], "x\n1\n1,2\n", 1, "the table, row 1: it has 2 values, expected 1"),
        (["--csv", "FILE"], 'x\n1\n"2', 1, "is no CSV"),
        (
            ["--csv", "FILE"],
            "x\n1\n\n2.5\n",
            1,
            "column 'x', row 1: 2.5 is no whole number",
        ),
        (["--csv", "FILE", "--start-row", "9"], "x\n1\n", 1, "it has 1 rows, and 9 are to be left out"),
        (
            ["--rows", "FILE", "--format", "jsonl"],
            '{"x": 1}\n{"x": null}',
            1,
            "column 'x', row 1: it is null",
        ),
        (
            ["--rows", "FILE", "--format", "jsonl"],
            '{"x": 1}\n{"X": 2}\n',
            1,
            "row 1: the row does not have it",
        ),
        (["--rows", "FILE", "--format", "jsonl"], '{"x": 1}\n\n[1]', 1, "row 1: it is no JSON object"),
        (["--rows", "FILE", "--format", "parquet"], "PAR1", 1, "it is no Parquet that can be read"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    content: str,
    code: int,
    text: str,
    server: conch.Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "in"
    path.write_text(content)
    given_too = [str(path) if each == "FILE" else each for each in arguments]
    found, _, errors = run(capsys, str(server.grpc_url), "picky", *given_too)
    assert (found, text in errors) == (code, True), errors


@pytest.mark.parametrize("arguments", [("absent",), ("picky", "--output", "y")])
def test_outputs_of_an_earlier_run_stay_if_the_model_can_not_answer(
    arguments: tuple[str, ...], server: conch.Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, out = tmp_path / "in.csv", tmp_path / "out.csv"
    rows.write_text("x\n1\n")
    out.write_text("x\n7\n")
    code, _, _ = run(capsys, str(server.grpc_url), *arguments, "--csv", rows, "-o", out)
    assert (code != 0, out.read_text()) == (True, "x\n7\n")


@given(
    st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.floats()),
        min_size=1,
    ),
    st.data(),
)
def test_csv_is_read_in_pieces_as_it_is_written(rows: list[tuple[str, float]], data: st.DataObject) -> None:
    texts = np.empty(len(rows), object)
    texts[:] = [text for text, _ in rows]
    content = csv_text({"text": texts, "number": np.array([number for _, number in rows])}).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    skip = data.draw(st.integers(0, len(rows)))
    reader = RowReader(_Pieces(content, cuts), "csv", len(content))
    tables = list(reader.tables(skip, lambda name: True))
    found = [text for table in tables for text in table.columns["text"]]
    assert found == texts.tolist()[skip:]
    numbers = [cell for table in tables for cell in table.columns["number"]]
    np.testing.assert_array_equal(
        [float(cell or "nan") for cell in numbers], [each for _, each in rows][skip:]
    )
    assert reader.fraction == 1.0


class _Pieces(io.BytesIO):
    """A file that is read in pieces of its own."""

    def __init__(self, content: bytes, cuts: list[int]) -> None:
        super().__init__(content)
        self._ends = iter([*cuts, len(content)])

    def read(self, size: int | None = -1, /) -> bytes:
        for end in self._ends:
            if found := super().read(end - self.tell()):
                return found
        return b""


def test_rows_of_a_file_that_ends_within_one_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "o.csv"
    path.write_text('a\n"1\n2"\n3\n')
    assert rows_of(path, "csv") == 2
    path.write_text('a\n"1\n2"\n3')
    with pytest.raises(Exception, match="ends within a row: remove its last line"):
        rows_of(path, "csv")
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(RowFileError, match=r"o\.csv: the table: it is no UTF-8"):
        rows_of(path, "csv")


@pytest.mark.parametrize(
    ("columns", "shown"),
    [(80, "[###############...............]  50%  1,000 rows, "), (20, "1,000 rows, "), (0, "[####")],
)
def test_a_bar_is_for_terminals_only(columns: int, shown: str) -> None:
    """One that is narrow has no bar, but the amount, in one line."""
    plain = io.StringIO()
    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, columns))
    with open(terminal, "rb", 0) as screen, open(end, "w") as out:
        for each in (plain, out):
            bar = ProgressBar(each)
            bar.show(1000, 0.5)
            bar.clear()
        found = b""
        while found.count(b"\r\x1b[K") < 2:  # a terminal may pass on each write by itself
            found += screen.read(1000)
        line, cleared = found.decode().removeprefix("\r\x1b[K").split("\r\x1b[K")
    assert line.startswith(shown) and not cleared and not plain.getvalue()
    assert not columns or len(line) < columns
