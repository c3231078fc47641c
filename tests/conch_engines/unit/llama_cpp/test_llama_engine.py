"""The engine of the backend llama_cpp in this process, with random models."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
import xllamacpp
from tests.support.llama_models import write_adapter, write_kind

from conch.core.errors import InvalidArgumentError
from conch_engines.language.grammars import Grammar
from conch_engines.language.random_model import write_random_model
from conch_engines.llama_cpp.llama_sampling import Sampling
from conch_engines.llama_cpp.llama_settings import LlamaSettings
from conch_engines.llama_cpp.token_logprobs import chat_logprobs
from conch_llm.deltas import Delta

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SLOTS = 2
CONTEXT = 1024
PROMPT = [1, 5, 6, 44, 71]


def open_engine(path: Path, adapters: dict[str, Path] | None = None, **parameters: str) -> Any:
    from conch_engines.llama_cpp.llama_engine import Engine

    given = {"num_threads": "1", "max_num_seqs": str(SLOTS), "max_num_batched_tokens": "32", **parameters}
    return Engine("tiny", path, LlamaSettings.of(given), CONTEXT, adapters)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    write_random_model(tmp_path / "model.gguf")
    opened = open_engine(tmp_path / "model.gguf")
    yield opened
    opened.close()


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def answer(
    engine: Any, prompt: str | Sequence[int], most: int = 24, form: Any = None, **more: Any
) -> list[Delta]:
    ids = await engine.encode(prompt, False) if isinstance(prompt, str) else prompt
    sampling = Sampling({**GREEDY, **more.pop("values", {})}, **more)
    return [each async for each in engine.generate(ids, most, sampling, form or chat_logprobs(0))]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_answers_are_those_of_the_engines_own_port(tmp_path: Path, loop: asyncio.Runner, kind: str) -> None:
    """Token ids and log probabilities of the chosen and of the likeliest tokens, greedy."""
    write_kind(tmp_path / "model.gguf", kind)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(tmp_path / "model.gguf")
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.verbosity = 1
    own = xllamacpp.Server(parameters)
    body = {"prompt": PROMPT, "max_tokens": 40, "n_probs": 3, "stream": True, **GREEDY}
    lines = httpx.post(f"{own.listening_address}/v1/completions", json=body, timeout=300).text.splitlines()
    pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    del own
    wanted = [each for piece in pieces for each in (piece["choices"][0]["logprobs"] or {}).get("content", ())]
    assert len({each["id"] for each in wanted}) > 8

    opened = open_engine(tmp_path / "model.gguf")
    found = loop.run(answer(opened, PROMPT, 40, list, values={"n_probs": 3}, logprobs=3))
    opened.close()
    assert [entry for delta in found for entry in delta.logprobs or ()] == wanted


def test_each_of_many_streams_has_the_text_that_it_has_alone(engine: Any, loop: asyncio.Runner) -> None:
    prompts = [f"the thing number {number} of many" for number in range(3 * SLOTS)]

    async def concurrent() -> list[str]:
        return [text(each) for each in await asyncio.gather(*(answer(engine, each) for each in prompts))]

    alone = [text(loop.run(answer(engine, prompt))) for prompt in prompts]
    assert loop.run(concurrent()) == alone
    assert len(set(alone)) > SLOTS


def test_what_a_killed_engine_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write_random_model(tmp_path / "model.gguf")
    (tmp_path / "conch-llama-left").mkdir()
    opened = open_engine(tmp_path / "model.gguf")
    assert len(list(tmp_path.glob("conch-llama-*"))) == 1
    opened.close()
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]


def test_counts_and_reasons(engine: Any, loop: asyncio.Runner) -> None:
    deltas = loop.run(answer(engine, "hello", 7))
    assert deltas[0].prompt_tokens == 5
    assert sum(delta.tokens for delta in deltas) == 7
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    again = loop.run(answer(engine, "hello", 1))
    assert (again[0].prompt_tokens, again[0].cached_tokens) == (5, 4)  # the last one is evaluated


def test_pieces_are_the_texts_of_single_tokens(engine: Any, loop: asyncio.Runner) -> None:
    written = "é😀 a thing<|im_end|>"
    ids, pieces = loop.run(engine.pieces(written, False))
    assert ids == loop.run(engine.encode(written, False))
    assert pieces == [loop.run(engine.decode([each])) for each in ids]
    assert pieces[0] == "\ufffd" and pieces[-1] == "<|im_end|>"
    assert loop.run(engine.pieces("", False)) == ([], [])


def test_what_is_left_of_the_context_is_the_most(engine: Any, loop: asyncio.Runner) -> None:
    deltas = loop.run(answer(engine, [5] * (CONTEXT - 4), 50))
    assert sum(delta.tokens for delta in deltas) == 4 and deltas[-1].finish_reason == "length"
    with pytest.raises(InvalidArgumentError, match=rf"context length is {CONTEXT} tokens.* {CONTEXT} tokens"):
        loop.run(answer(engine, [5] * CONTEXT))


def test_a_request_that_is_cancelled_in_its_prompt_frees_its_slot(
    tmp_path: Path, loop: asyncio.Runner
) -> None:
    from conch_engines.llama_cpp.llama_engine import Engine

    write_random_model(tmp_path / "model.gguf")
    prompt = [7, 8] * 1000
    running, idle = asyncio.Event(), asyncio.Event()

    def report(now: int, waiting: int) -> None:
        (running if now else idle).set()
        (idle if now else running).clear()

    settings = LlamaSettings.of({"num_threads": "1", "max_num_seqs": "1", "max_num_batched_tokens": "2"})
    opened = Engine("tiny", tmp_path / "model.gguf", settings, 2048, report=report)

    async def cancel_in_the_prompt() -> list[Delta]:
        waits = asyncio.ensure_future(answer(opened, prompt, 4))
        await running.wait()
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        again = await answer(opened, prompt, 1)
        await idle.wait()
        return again

    (cached,) = (each.cached_tokens for each in loop.run(cancel_in_the_prompt()) if each.prompt_tokens)
    opened.close()
    assert cached is not None and cached < len(prompt) - 2  # of the first request


def test_a_generator_that_is_closed_ends_its_request(engine: Any, loop: asyncio.Runner) -> None:
    async def close_after_a_token() -> str:
        other = asyncio.ensure_future(answer(engine, "a thing", 40))
        async with aclosing(engine.generate(PROMPT, 900, Sampling(GREEDY), chat_logprobs(0))) as deltas:
            await anext(deltas)
        return text(await other)

    found = loop.run(close_after_a_token())
    assert found == text(loop.run(answer(engine, "a thing", 40)))


@pytest.mark.parametrize(
    ("kind", "constraint", "fits"),
    [
        ("json_schema", {"type": "integer", "minimum": 3, "maximum": 5}, lambda found: 3 <= int(found) <= 5),
        ("json_schema", {"enum": ["é/", {"b": [1]}]}, lambda found: json.loads(found) in ("é/", {"b": [1]})),
        ("json_schema", True, lambda found: json.loads(found) is not Ellipsis),
        ("regex", r"[ab]{2}/\n?\/c", lambda found: found[2:].replace("\n", "") == "//c"),
        ("grammar", 'root ::= "é😀" | "b"', lambda found: found in ("é😀", "b")),
    ],
)
def test_answers_obey_their_constraint(
    engine: Any, loop: asyncio.Runner, kind: str, constraint: Any, fits: Any
) -> None:
    written = json.dumps(constraint) if kind == "json_schema" else constraint
    for seed in range(4):
        values = {"temperature": 5, "ignore_eos": False, "seed": seed}
        found = loop.run(answer(engine, "hello", 900, values=values, grammar=Grammar(kind, written)))
        assert fits(text(found)) and found[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("kind", "constraint", "named"),
    [
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"type": "array", "contains": {}}, "contains"),
        ("json_schema", {"type": "array", "items": [{}], "additionalItems": False}, "additionalItems"),
        ("json_schema", {"properties": {"a": {"not": {}}}}, "not"),
        ("json_schema", {"type": "string", "format": "colour"}, "colour"),
        ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ("json_schema", {"x-guidance": {"whitespace_flexible": True}}, "x-guidance"),
        ("json_schema", False, "false"),
        ("regex", "(", "unclosed group"),
        ("grammar", "root ::= (", "failed to parse grammar"),
        ("grammar", 'root ::= root "a"', "failed to parse grammar"),
        ("grammar", "%llguidance {}\nstart: ((", "Expected token"),
    ],
)
def test_what_the_engine_cannot_hold_is_refused(
    engine: Any, loop: asyncio.Runner, kind: str, constraint: Any, named: str
) -> None:
    written = json.dumps(constraint) if kind == "json_schema" else constraint
    with pytest.raises(InvalidArgumentError, match=named):
        loop.run(answer(engine, "hello", grammar=Grammar(kind, written)))


def test_an_adapter_is_chosen_by_name(tmp_path: Path, loop: asyncio.Runner) -> None:
    write_random_model(tmp_path / "model.gguf")
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / f"{name}.lora", seed)
    opened = open_engine(
        tmp_path / "model.gguf", {name: tmp_path / f"{name}.lora" for name in ("one", "two")}
    )
    plain = open_engine(tmp_path / "model.gguf")
    said = {name: text(loop.run(answer(opened, "hello", lora=name))) for name in ("", "one", "two", "")}
    assert said[""] == text(loop.run(answer(plain, "hello")))
    assert len(set(said.values())) == 3
    with pytest.raises(InvalidArgumentError, match="no adapter 'three'"):
        loop.run(answer(opened, "hello", lora="three"))
    opened.close()
    plain.close()


@pytest.mark.parametrize(
    ("left", "named"),
    [
        (0, "failed to read magic"),
        (100_000, r"tensor 'blk\.0\.ffn_up\.weight' data is not within the file bounds"),
    ],
)
def test_a_load_that_fails_has_the_engines_words(tmp_path: Path, left: int, named: str) -> None:
    path = tmp_path / "model.gguf"
    write_random_model(path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(InvalidArgumentError, match=named):
        open_engine(path)
