"""The engine's loop with a random model: streams, cancellation, grammars, prefix cache."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.genai_models import genai_library

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_engines.genai.blanks import MOST_BLANKS, Blanks
from conch_engines.genai.engine_settings import EngineSettings
from conch_engines.genai.model_on_disk import find_model
from conch_engines.genai.sampling import Sampling
from conch_engines.genai.text_decoder import TextDecoder, TextStream
from conch_engines.language.grammars import Grammar
from conch_engines.language.random_model import CONTEXT, write_random_model
from conch_llm.deltas import Delta

genai = genai_library().genai
GREEDY: dict[str, Any] = {"do_sample": False}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from conch_engines.genai.engine import Engine

    directory = tmp_path_factory.mktemp("genai")
    write_random_model(directory / "model.gguf")
    settings = EngineSettings.of({"max_num_batched_tokens": "64"})
    yield Engine("tiny", find_model(directory, "tiny"), settings)


async def answer(engine: Any, prompt: str | list[int], most: int = 24, **more: Any) -> list[Delta]:
    ids = engine.encode(prompt, False) if isinstance(prompt, str) else prompt
    sampling = Sampling({**GREEDY, **more.pop("values", {})}, **more)
    return [delta async for delta in engine.generate(ids, most, sampling, as_chat=True)]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_each_of_many_streams_has_the_text_that_it_has_alone(engine: Any) -> None:
    prompts = [f"the thing number {number} of many" for number in range(32)]

    async def concurrent(count: int) -> list[str]:
        return [text(each) for each in await asyncio.gather(*(answer(engine, p) for p in prompts[:count]))]

    async def one_by_one() -> list[str]:
        return [text(await answer(engine, prompt)) for prompt in prompts]

    alone = asyncio.run(one_by_one())
    assert asyncio.run(concurrent(8)) == alone[:8]
    assert asyncio.run(concurrent(32)) == alone
    assert len(set(alone)) > 16  # so they can be told apart


def test_counts_and_reasons(engine: Any) -> None:
    deltas = asyncio.run(answer(engine, "hello", 7, values={"ignore_eos": True}))
    assert deltas[0].prompt_tokens == 5
    assert sum(delta.tokens for delta in deltas) == 7
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    first = asyncio.run(answer(engine, "hello", 1, logprobs=True, values={"logprobs": 1}))
    assert len(first[-1].logprobs) == 1 and first[-1].logprobs[0]["logprob"] < 0


def test_a_stop_token_is_told(engine: Any) -> None:
    values = {"stop_token_ids": set(range(3, 260))}
    last = asyncio.run(answer(engine, "hello", values=values))[-1]
    assert last.finish_reason == "stop" and last.stop_reason in values["stop_token_ids"]


def test_closing_the_generator_frees_the_request(engine: Any) -> None:
    async def close_one_of_two() -> tuple[str, int]:
        other = asyncio.ensure_future(answer(engine, "a thing", 40))
        sampling = Sampling({**GREEDY, "ignore_eos": True})
        before = engine.steps
        async with aclosing(
            engine.generate(engine.encode("on and on", False), 400, sampling, True)
        ) as deltas:
            async for delta in deltas:
                if delta.tokens:
                    break
        found = text(await other)
        while len(asyncio.all_tasks()) > 1:  # until the engine rests
            await asyncio.sleep(0)
        return found, engine.steps - before

    found, steps = asyncio.run(close_one_of_two())
    assert found == text(asyncio.run(answer(engine, "a thing", 40)))
    assert steps < 100  # the closed request would have taken 400


def test_a_prompt_that_was_there_takes_fewer_steps(engine: Any) -> None:
    prompt = [3 + number * 7 % 250 for number in range(320)]  # five steps of 64 tokens

    def steps() -> int:
        before = engine.steps
        asyncio.run(answer(engine, prompt, 1))
        return int(engine.steps - before)

    assert steps() >= 5
    assert steps() < 5


@pytest.mark.parametrize("n", [1, 4])
def test_answers_obey_their_schema(engine: Any, n: int) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}, "of": {"enum": ["a", "b"]}},
        "required": ["yes", "of"],
        "additionalProperties": False,
    }
    grammar = Grammar("json_schema", json.dumps(schema))

    async def answers() -> list[list[Delta]]:
        values = {"do_sample": True, "rng_seed": n}
        return await asyncio.gather(
            *(answer(engine, f"number {each}", 300, grammar=grammar, values=values) for each in range(n))
        )

    for deltas in asyncio.run(answers()):
        if deltas[-1].finish_reason == "stop":  # white space may have taken all tokens
            found = json.loads(text(deltas))
            assert set(found) == {"yes", "of"} and found["of"] in ("a", "b")
    written = text(asyncio.run(answer(engine, "hello", grammar=Grammar("regex", "(ab){3}"))))
    assert re.fullmatch("(ab){3}", written)


@pytest.mark.parametrize(
    "grammar",
    [Grammar("regex", "(ab"), Grammar("json_schema", '{"type": "foo"}'), Grammar("grammar", "root = x")],
)
def test_a_malformed_grammar_disturbs_no_other_request(engine: Any, grammar: Grammar) -> None:
    async def beside() -> str:
        other = asyncio.ensure_future(answer(engine, "a thing", 30))
        await asyncio.sleep(0)
        with pytest.raises(InvalidArgumentError, match=grammar.kind):
            await answer(engine, "hello", grammar=grammar)
        return text(await other)

    assert asyncio.run(beside()) == text(asyncio.run(answer(engine, "a thing", 30)))


def test_after_a_failed_step_the_engine_is_opened_again(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With a malformed grammar that is not checked, as it is no `Grammar`."""
    malformed = genai.StructuredOutputConfig(regex="(ab")

    async def both() -> Any:
        other = asyncio.ensure_future(answer(engine, "a thing", 400, values={"ignore_eos": True}))
        await asyncio.sleep(0)
        failing = answer(engine, "hello", values={"structured_output_config": malformed})
        return await asyncio.gather(other, failing, return_exceptions=True)

    before = text(asyncio.run(answer(engine, "a thing", 30)))
    found = asyncio.run(both())
    assert [type(each) for each in found] == [UnavailableError] * 2
    assert caplog.messages == ["the engine of model 'tiny' failed and is opened again"]
    assert text(asyncio.run(answer(engine, "a thing", 30))) == before


def test_a_prompt_beyond_the_context_is_refused(engine: Any) -> None:
    beginning = (
        f"This model's maximum context length is {CONTEXT} tokens. However, your prompt contains {CONTEXT} "
    )
    with pytest.raises(InvalidArgumentError, match=beginning):
        asyncio.run(answer(engine, "a" * CONTEXT))


def test_a_text_that_the_tokenizer_cuts_is_refused(engine: Any) -> None:
    """The engine's tokenizer keeps the last 8192 tokens, and does not say so."""
    for count in (100, 8191):
        assert len(engine.encode("c" * count, False)) == count
    for text in ("ab " * 5000, "b" * 8193, "b" * 8193, "d " * 5000):
        for special in (False, True):
            with pytest.raises(
                InvalidArgumentError,
                match=rf"^This model's maximum context length is {CONTEXT} tokens.*at least 8192 tokens",
            ):
                engine.encode(text, special)


def test_the_loop_goes_on_while_a_long_text_is_encoded(engine: Any) -> None:
    async def turns(text: str) -> int:
        encoding = asyncio.ensure_future(engine.tokens_of(text, False))
        count = 0
        while not encoding.done():
            await asyncio.sleep(0)
            count += 1
        with suppress(InvalidArgumentError):  # it is cut
            await encoding
        return count

    assert asyncio.run(turns("a")) == 1
    assert asyncio.run(turns("a thing " * 50_000)) > 10


def test_characters_of_several_tokens_are_whole(engine: Any) -> None:
    written = "é € 😀 thing on"
    stream, decoder = TextStream(), TextDecoder(engine.tokenizer)
    pieces: list[str] = []
    ids = engine.encode(written, False)
    for place, token in enumerate(ids):
        stream.add([token], place == len(ids) - 1)
        decoder.decode([stream])
        pieces.append(stream.text)
    assert "".join(pieces) == written
    assert not any("\ufffd" in piece for piece in pieces)


def coded(token: str) -> bytes:
    """The bytes of a token of a completion's log probabilities."""
    parts = token.removeprefix("bytes:").split("\\x")
    return bytes.fromhex("".join(parts)) if parts[1:] else token.encode()


@pytest.mark.parametrize("text", ["the é thing", "€ 😀"])
def test_log_probabilities_have_the_bytes_of_each_token(engine: Any, text: str) -> None:
    grammar = Grammar("grammar", f"root ::= {json.dumps(text, ensure_ascii=False)}")
    found: dict[bool, list[Any]] = {}
    for as_chat in (True, False):
        sampling = Sampling({**GREEDY, "logprobs": 1}, grammar, True, True)
        deltas = asyncio.run(collected(engine.generate([5], 40, sampling, as_chat)))
        found[as_chat] = [delta.logprobs for delta in deltas if delta.logprobs]
    entries = [entry for part in found[True] for entry in part]
    tokens = [bytes(entry["bytes"]) for entry in entries]
    assert b"".join(tokens) == text.encode() + b"<|im_end|>"
    assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in entries)

    def listed(name: str) -> list[Any]:
        return [each for part in found[False] for each in part[name]]

    assert [coded(each) for each in listed("tokens")] == tokens
    assert [list(each) for each in listed("top_logprobs")] == [[each] for each in listed("tokens")]
    starts = [len(b"".join(tokens[:count])) for count in range(len(tokens))]
    begun = [len(text.encode()[:start].decode(errors="replace")) for start in starts]
    assert listed("text_offset") == begun


async def collected(deltas: Any) -> list[Delta]:
    return [delta async for delta in deltas]


def test_json_that_goes_on_with_blanks_ends(engine: Any) -> None:
    schema = Grammar("json_schema", '{"type": "object"}')
    endless = asyncio.run(answer(engine, "a thing", 2000, grammar=schema))
    assert text(endless).strip() == "{" and endless[-1].finish_reason == "length"
    assert MOST_BLANKS < len(text(endless)) < 2 * MOST_BLANKS
    # Those within texts are not counted, nor those between values.
    blanks = json.dumps({"a": " " * 2 * MOST_BLANKS, "b": 1}, indent=4)
    assert not any(map(Blanks().endless, [*blanks, "\n", " "]))


def test_a_folder_answers_as_its_gguf_file(engine: Any, tmp_path: Path) -> None:
    from conch_engines.genai.engine import Engine

    gguf = tmp_path / "model.gguf"
    write_random_model(gguf)
    tokenizer = genai.Tokenizer(str(gguf), enable_save_ov_model=True)
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 4
    genai.ContinuousBatchingPipeline(str(gguf), tokenizer, scheduler, "CPU", enable_save_ov_model=True)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    files = find_model(tmp_path, "tiny")
    assert files.path == tmp_path and files.context_length == 100
    folder = Engine("tiny", files, EngineSettings.of({}))
    few = 4  # later ones differ, as the folder has other kernels
    written = text(asyncio.run(answer(folder, "a thing", few)))
    assert written and written == text(asyncio.run(answer(engine, "a thing", few)))
