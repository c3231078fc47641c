"""Python models with `chat`, `complete`, `embed` and `score`, without a server."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.environments import make_venv
from tests.support.servers import eventually, write_model
from tests.support.text_models import (
    CHAT,
    COMPLETIONS,
    asked,
    choices,
    conversation,
    deltas,
    python_config,
    text_model,
)

import conch.testing
from conch.testing import ModelError
from conch_llm.deltas import Delta, decode_deltas

WORDS = 'request.messages[-1]["content"].split()'


@pytest.mark.parametrize(
    "method",
    [
        f"async def chat(self, request):\n    for word in {WORDS}:\n        yield word",
        f"async def chat(self, request):\n    return {WORDS}",
        f"def chat(self, request):\n    for word in {WORDS}:\n        yield Delta(word)",
        f"def chat(self, request):\n    return ''.join({WORDS})",
        f"def chat(self, request):\n    return self.words(request)\n"
        f"async def words(self, request):\n    for word in {WORDS}:\n        yield word",
    ],
    ids=["async generator", "coroutine", "generator", "function", "function with an async generator"],
)
@pytest.mark.parametrize("stream", [True, False])
def test_forms_of_methods(tmp_path: Path, method: str, stream: bool) -> None:
    with conch.testing.load(text_model(tmp_path, method)) as model:
        found = deltas(model, CHAT, conversation("a b c", stream=stream))
    assert choices(found) == {0: "abc"}
    assert [delta.finish_reason for delta in found if delta.finish_reason] == ["stop"]
    assert found[-1].finish_reason == "stop"


def test_requests_of_tensors(tmp_path: Path) -> None:
    directory = text_model(
        tmp_path,
        """
        async def complete(self, request):
            yield Delta(prompt_tokens=2)
            for word in request.prompt.split():
                yield Delta(word + request.params.get("end", ""), tokens=1)
        """,
    )
    with conch.testing.load(directory) as model:
        (whole,) = model.run({"text_input": ["a b"]})
        assert {name: array.tolist() for name, array in whole.items()} == {
            "text_output": [b"ab"],
            "finish_reason": [b"stop"],
            "num_input_tokens": [2],
            "num_output_tokens": [2],
        }
        sampling = {"n": 2, "end": ".", "max_tokens": 1}
        inputs = {"text_input": ["a b"], "sampling_parameters": [json.dumps(sampling)]}
        (cut,) = model.run({**inputs, "exclude_input_in_output": [False]})
        assert cut["text_output"].tolist() == [b"a ba."] * 2
        assert cut["finish_reason"].tolist() == [b"length"] * 2
        parts = model.run({"text_input": ["a b"], "stream": [True]}, outputs=["text_output"])
        assert [part["text_output"].tolist() for part in parts] == [[b""], [b"a"], [b"b"], [b""]]
        with pytest.raises(ModelError, match="is not allowed") as caught:
            model.run({**inputs, "stream": [True], "exclude_input_in_output": [False]})
        assert caught.value.code == "INVALID_ARG"


@pytest.mark.parametrize("method", ["chat", "complete"])
def test_the_chat_template_makes_the_prompt(tmp_path: Path, method: str) -> None:
    prompt = {"chat": "request.prompt()", "complete": "request.prompt"}[method]
    source = f"""
    async def {method}(self, request):
        yield {prompt}
    """
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools | length }}"
    directory = text_model(tmp_path, source, config=python_config(CONCH_TOOL_PARSER="hermes"))
    (directory / "1" / "chat_template.jinja").write_text(template)
    with conch.testing.load(directory) as model:
        assert choices(deltas(model, CHAT, conversation("a", tools=[{}]))) == {0: "<user>a1"}


def test_the_reasoning_effort_is_a_variable_of_the_template(tmp_path: Path) -> None:
    source = """
    async def complete(self, request):
        yield request.prompt
    """
    directory = text_model(tmp_path, source)
    (directory / "1" / "chat_template.jinja").write_text("{{ reasoning_effort }}")
    with conch.testing.load(directory) as model:
        body = conversation("a", reasoning_effort="low")
        assert choices(deltas(model, CHAT, body)) == {0: "low"}
        body["chat_template_kwargs"] = {"reasoning_effort": "high"}
        assert choices(deltas(model, CHAT, body)) == {0: "high"}


def test_the_route_chooses_the_adapter(tmp_path: Path) -> None:
    source = """
    async def complete(self, request):
        yield f"{request.lora} {request.params}"
    """
    with conch.testing.load(text_model(tmp_path, source)) as model:
        given = asked(COMPLETIONS, {"prompt": "x", "lora_name": "other", "top_k": 1})
        given["parameters"]["lora_name"] = "mine"
        (response,) = model.run(**given)
    assert choices(decode_deltas(response["text_output"][0])) == {0: "mine {'top_k': 1}"}


def test_choices_are_calls_with_seeds_of_their_own(tmp_path: Path) -> None:
    source = """
    async def complete(self, request):
        yield Delta(prompt_tokens=len(request.prompt))
        yield f"{request.prompt} {request.seed} {request.n}"
    """
    body = {"prompt": ["x", "yz"], "n": 2, "seed": 7, "stream": True}
    with conch.testing.load(text_model(tmp_path, source)) as model:
        found = deltas(model, COMPLETIONS, body)
        assert choices(found) == {0: "x 7 1", 1: "x 8 1", 2: "yz 7 1", 3: "yz 8 1"}
        assert [delta.prompt_tokens for delta in found if delta.prompt_tokens] == [3]
        found = deltas(model, COMPLETIONS, {**body, "prompt": "x", "echo": True})
        assert choices(found) == {0: "xx 7 1", 1: "xx 8 1"}
        assert [delta.prompt_tokens for delta in found if delta.prompt_tokens] == [1]


def test_a_model_may_make_all_choices_in_one_call(tmp_path: Path) -> None:
    source = """
    handles_n = True

    def chat(self, request):
        for index in range(request.n):
            yield Delta(str(request.seed), index, tool_calls=[{"index": 0}] if index else ())
    """
    with conch.testing.load(text_model(tmp_path, source)) as model:
        found = deltas(model, CHAT, conversation(n=2, seed=7, stream=True))
        assert choices(found) == {0: "7", 1: "7"}
        reasons = {delta.index: delta.finish_reason for delta in found if delta.finish_reason}
        assert reasons == {0: "stop", 1: "tool_calls"}


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_a_stop_string_ends_the_generator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.INFO)
    source = f"""
    {kind} chat(self, request):
        try:
            while True:
                yield "ab"
        finally:
            logging.info("closed")
    """
    with conch.testing.load(text_model(tmp_path, source)) as model:
        found = deltas(model, CHAT, conversation(stop="ba", stream=True))
    assert found == [Delta("a"), Delta("", finish_reason="stop", stop_reason="ba")]
    assert caplog.messages == ["closed"]


def test_embeddings_and_scores(tmp_path: Path) -> None:
    source = """
    async def embed(self, inputs, request):
        size = request.params["dimensions"]
        return [[len(each)] * size for each in inputs], [len(each) for each in inputs]

    def score(self, query, documents, request):
        return [float(len(query + each)) for each in documents]
    """
    with conch.testing.load(text_model(tmp_path, source)) as model:
        assert model.config["parameters"]["CONCH_LLM"] == {"string_value": "embed,score"}

        def answer(route: str, body: dict[str, Any]) -> Any:
            (response,) = model.run(**asked(route, body))
            return json.loads(response["text_output"][0])

        embedded = answer("/v1/embeddings", {"input": ["a", "bcd"], "dimensions": 2})
        assert embedded == {"data": [[1.0, 1.0], [3.0, 3.0]], "prompt_tokens": 4}
        scored = {"scores": [2.0, 3.0], "prompt_tokens": None}
        assert answer("/v1/rerank", {"query": "q", "documents": ["a", {"text": "bc"}]}) == scored
        assert answer("/v1/score", {"text_1": ["q", "q"], "text_2": ["a", "bc"]}) == scored
        with pytest.raises(ModelError, match=r"can't answer /v1/chat/completions: it has embed, score"):
            model.run(**asked(CHAT, conversation()))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<think>why</think>yes<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def said(found: list[Delta]) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """Text, reasoning, calls and finish reason of the first choice."""
    calls: dict[int, tuple[str, str]] = {}
    for call in (call for delta in found for call in delta.tool_calls):
        name, arguments = calls.get(call["index"], ("", ""))
        function = call["function"]
        calls[call["index"]] = (name or function["name"], arguments + function["arguments"])
    reasoning = "".join(delta.reasoning for delta in found)
    return choices(found)[0], reasoning, list(calls.values()), found[-1].finish_reason


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("method", ["chat", "complete"])
def test_calls_and_reasoning_are_found_in_the_text(tmp_path: Path, method: str, stream: bool) -> None:
    """However it is cut; the second prompt ends inside the reasoning."""
    prompt = "request.prompt" if method == "complete" else "request.prompt()"
    source = f"""
    def {method}(self, request):
        opened = {prompt}.endswith("<think>")
        yield from {CALL!r}[len("<think>") if opened else 0:]
    """
    parsers = python_config(CONCH_TOOL_PARSER="hermes", CONCH_REASONING_PARSER="think")
    directory = text_model(tmp_path, source, config=parsers)
    (directory / "1" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with conch.testing.load(directory) as model:
        for text in ("hello", "<think>"):
            body = conversation(text, tools=[TOOL], stream=stream)
            assert said(deltas(model, CHAT, body)) == ("yes", "why", [("f", '{"x": 1}')], "tool_calls")
            body["tool_choice"] = "none"
            assert said(deltas(model, CHAT, body)) == (CALL.partition("</think>")[2], "why", [], "stop")


@pytest.mark.parametrize(
    ("choice", "finish_reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "f"}}, "stop")],
)
def test_a_forced_call_is_a_schema_for_the_model(tmp_path: Path, choice: object, finish_reason: str) -> None:
    source = """
    handles_schemas = True

    async def chat(self, request):
        assert request.prompt() == "<think>"  # a call has no reasoning
        schema = request.params["response_format"]["json_schema"]["schema"]
        yield '{"name": "%s", "arguments": ' % schema["properties"]["name"]["const"]
        yield '{"x": 1}}'
    """
    directory = text_model(tmp_path, source, config=python_config(CONCH_REASONING_PARSER="think"))
    (directory / "1" / "chat_template.jinja").write_text("<think>")
    with conch.testing.load(directory) as model:
        body = conversation(tools=[TOOL], tool_choice=choice)
        assert said(deltas(model, CHAT, body)) == ("", "", [("f", '{"x": 1}')], finish_reason)
        with pytest.raises(ModelError, match="response_format: a forced tool call has a schema of its own"):
            deltas(model, CHAT, {**body, "response_format": {"type": "json_object"}})


HERMES = "{% if tools and not messages %}<tool_call>{% endif %}{{ messages[0].content }}"
OWN_PROMPT = """
    tool_parser = "hermes"

    def render_prompt(self, request):
        return request.messages[0]["content"]
"""


@pytest.mark.parametrize(("template", "more"), [(HERMES, ""), ("", OWN_PROMPT)])
def test_the_template_tells_how_calls_are_read(
    tmp_path: Path, template: str, more: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = f"""
    def chat(self, request):
        return request.prompt()
{more}
    """
    directory = text_model(tmp_path, source)
    if template:
        (directory / "1" / "chat_template.jinja").write_text(template)
    with caplog.at_level("INFO"), conch.testing.load(directory) as model:
        body = conversation(CALL, tools=[TOOL])
        told = ("<think>why</think>yes", "", [("f", '{"x": 1}')], "tool_calls")
        assert said(deltas(model, CHAT, body)) == told
    assert "by its chat template, its tool calls are hermes" in caplog.text


def test_a_model_may_handle_tools_by_itself(tmp_path: Path) -> None:
    source = f"""
    handles_tools = True

    async def chat(self, request):
        yield {CALL!r}
        function = {{"name": str(request.params.get("tool_choice")), "arguments": "{{}}"}}
        yield Delta(tool_calls=[{{"index": 0, "id": "1", "type": "function", "function": function}}])
    """
    with conch.testing.load(text_model(tmp_path, source)) as model:
        for choice in ("auto", "required"):
            body = conversation(tools=[TOOL], tool_choice=choice)
            assert said(deltas(model, CHAT, body)) == (CALL, "", [(choice, "{}")], "tool_calls")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_a_form_that_the_model_cannot_keep_is_refused(
    tmp_path: Path, body: dict[str, Any], field: str
) -> None:
    source = """
    def chat(self, request):
        return "x"
    """
    with conch.testing.load(text_model(tmp_path, source)) as model:
        with pytest.raises(ModelError, match=f"^{field}: ") as caught:
            deltas(model, CHAT, conversation(**body))
        assert caught.value.code == "INVALID_ARG"
        free = conversation(tools=[TOOL], tool_choice="none", response_format={"type": "text"})
        assert choices(deltas(model, CHAT, free)) == {0: "x"}


@pytest.mark.parametrize("name", ["CONCH_TOOL_PARSER", "CONCH_REASONING_PARSER"])
def test_an_unknown_parser_fails_the_load(tmp_path: Path, name: str) -> None:
    source = """
    def chat(self, request):
        return "x"
    """
    directory = text_model(tmp_path, source, config=python_config(**{name: "guess"}))
    with pytest.raises(conch.InvalidArgumentError, match=f"parameter '{name}': unknown .* 'guess'"):
        conch.testing.load(directory)


def test_tokens(tmp_path: Path) -> None:
    source = """
    def tokenize(self, text, request):
        text = text if request.chat is None else request.chat.prompt()
        ids = [1] * request.add_special_tokens + [ord(each) for each in text]
        return {"tokens": ids, "token_strs": [chr(each) for each in ids], "max_model_len": 64}

    async def detokenize(self, tokens, request):
        return "".join(map(chr, tokens))

    def render_prompt(self, request):
        return request.messages[0]["content"] + "!"
    """
    with conch.testing.load(text_model(tmp_path, source)) as model:
        assert model.config["parameters"]["CONCH_LLM"] == {"string_value": "tokenize"}

        def answer(route: str, body: dict[str, Any]) -> Any:
            (response,) = model.run(**asked(route, body))
            return json.loads(response["text_output"][0])

        shape = {"count": 3, "max_model_len": 64, "token_strs": None}
        assert answer("/tokenize", {"prompt": "ab"}) == {**shape, "tokens": [1, 97, 98]}
        assert answer("/tokenize", conversation("ab", return_token_strs=True)) == {
            **shape,
            "tokens": [97, 98, 33],
            "token_strs": ["a", "b", "!"],
        }
        plain = answer("/tokenize", {"prompt": "ab", "add_special_tokens": False})
        assert plain == {**shape, "count": 2, "tokens": [97, 98]}
        assert answer("/detokenize", {"tokens": plain["tokens"]}) == {"prompt": "ab"}
        for route, body, problem in (
            ("/tokenize", {}, "prompt: must be a text; or give messages"),
            ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens: must be true or"),
            ("/detokenize", {"tokens": ["a"]}, "tokens: must be a list of at most"),
            ("/detokenize", {"tokens": [1] * ((1 << 17) + 1)}, "tokens: must be a list of at most 131072"),
            ("/tokenize", {"prompt": "a" * ((1 << 19) + 1)}, "prompt: must have at most 524288 characters"),
        ):
            with pytest.raises(ModelError, match=problem):
                answer(route, body)


@pytest.mark.parametrize(
    ("route", "body", "text"),
    [
        (CHAT, {}, "messages: must be a list of at least one object"),
        (CHAT, conversation(n=0), "n: must be an integer of at least 1, not 0"),
        (CHAT, conversation(n=129), "n: must be at most 128, not 129"),
        (CHAT, conversation(stop=[1]), "stop: must be a text or a list of texts"),
        (CHAT, conversation(max_tokens="x"), "max_tokens: must be an integer of at least 1, not 'x'"),
        (CHAT, conversation(seed=1.5), "seed: must be an integer, not 1.5"),
        (CHAT, conversation(tools={}, x=1), ""),
        (COMPLETIONS, {}, "prompt: must be a text, a list of tokens, or a list of these"),
        (COMPLETIONS, {"prompt": [1, 2], "echo": True}, "echo: needs prompts of text, not of tokens"),
        (COMPLETIONS, {"prompt": "refused"}, "refused"),
    ],
)
def test_requests_that_are_refused(tmp_path: Path, route: str, body: dict[str, Any], text: str) -> None:
    source = """
    def chat(self, request):
        return ""

    async def complete(self, request):
        raise conch.InvalidArgumentError(request.prompt)
        yield
    """
    with conch.testing.load(text_model(tmp_path, source)) as model:
        if not text:
            assert choices(deltas(model, route, body)) == {0: ""}
            return
        with pytest.raises(ModelError) as caught:
            deltas(model, route, body)
    assert (str(caught.value), caught.value.code) == (text, "INVALID_ARG")


@pytest.mark.parametrize("item", ["1", "Delta('x', 1)"])
@pytest.mark.parametrize("kind", ["async def", "def"])
@pytest.mark.parametrize("n", [1, 2])
def test_what_is_no_text_fails_the_request(tmp_path: Path, item: str, kind: str, n: int) -> None:
    source = f"""
    {kind} chat(self, request):
        yield {item}
    """
    problem = r"must yield str|has index 1, but 1 choices"
    with (
        conch.testing.load(text_model(tmp_path, source)) as model,
        pytest.raises((TypeError, ValueError), match=problem),
    ):
        deltas(model, CHAT, conversation(n=n))


def test_generators_that_block_leave_others_alone(tmp_path: Path) -> None:
    """Each waits for the last one, more than there are threads in a default pool."""
    source = """
    def initialize(self, args):
        self.all_here = threading.Barrier(40)

    def chat(self, request):
        self.all_here.wait()
        yield "met"
    """
    with conch.testing.load(text_model(tmp_path, source)) as model:
        answers = model.run_all([{"text_input": ["x"]}] * 40)
    assert [answer[0]["text_output"].tolist() for answer in answers] == [[b"met"]] * 40


@pytest.mark.parametrize(
    "source",
    [
        """
        async def chat(self, request):
            try:
                yield "first"
                await asyncio.Event().wait()
            finally:
                logging.info("closed")
        """,
        """
        def chat(self, request):
            try:
                while True:
                    yield "again"
            finally:
                logging.info("closed")
        """,
    ],
    ids=["at once", "at its next yield"],
)
@pytest.mark.parametrize("n", [1, 2])
def test_cancellation_closes_generators(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str, n: int
) -> None:
    caplog.set_level(logging.INFO)
    with conch.testing.load(text_model(tmp_path, source)) as model:
        stream = model.stream(**asked(CHAT, conversation(n=n, stream=True)))
        started: set[int] = set()
        with closing(stream):  # type: ignore[type-var]
            while len(started) < n:
                started |= {delta.index for delta in decode_deltas(next(stream)["text_output"][0])}
        eventually(lambda: caplog.messages.count("closed") == n, "the generators are closed")


def test_the_models_own_completion_and_checks(tmp_path: Path) -> None:
    source = """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "extra", "data_type": "TYPE_INT32", "dims": [1], "optional": True})
        return config

    def is_ready(self):
        return True

    def complete(self, request):
        return "x"
    """
    with conch.testing.load(text_model(tmp_path, source)) as model:
        names = [tensor["name"] for tensor in model.config["input"]]
        assert names[:2] == ["extra", "text_input"]
        assert model.config["parameters"]["CONCH_LLM"] == {"string_value": "chat,complete"}
        with pytest.raises(ModelError, match="has no chat template"):
            deltas(model, CHAT, conversation())
    batched = text_model(tmp_path, source, "batched", 'backend: "python" max_batch_size: 8')
    with pytest.raises(ValueError, match="specified max_batch_size 8"):
        conch.testing.load(batched)


def test_a_class_with_execute_stays_as_it_is(tmp_path: Path) -> None:
    source = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def score(self, values):
        return values * 2

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.score(each.inputs()[0].as_numpy()))])
            for each in requests
        ]
"""
    config = """
    input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
    """
    directory = write_model(tmp_path, "m", config, {"model.py": source})
    assert conch.testing.run(directory, {"IN": [2.0]})["OUT"].tolist() == [4.0]


@pytest.mark.process
def test_a_worker_with_an_environment_of_its_own(tmp_path: Path) -> None:
    """There, conch_llm is not installed: the server hands it in."""
    make_venv(tmp_path / "venv")
    config = f"""
    backend: "python"
    parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{tmp_path}/venv" }} }}
    """
    source = """
    async def chat(self, request):
        import sys
        yield sys.prefix
    """
    directory = text_model(tmp_path, source, config=config)
    with conch.testing.load(directory, placement="worker") as model:
        assert choices(deltas(model, CHAT, conversation())) == {0: f"{tmp_path}/venv"}
