"""Models that call other models, over a running server."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.calling import run, write_callers, write_script, write_until_cancelled
from tests.support.server_fixtures import LOAD_ALL, server_fixture
from tests.support.servers import (
    WAIT_S,
    AnyServer,
    client_of,
    eventually,
    past_deadline,
    serving,
    tensor,
    write_model,
)
from tritonclient.utils import InferenceServerException

NOT_READY = "Failed for execute the inference request. Model '{0}' is not ready."
DECOUPLED = (
    "Model stream is using the decoupled. The current BLS request call doesn't support models using the "
    "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls "
    "for decoupled models.'"
)
UNKNOWN = "Request for unknown model: 'nope' is not found"
WRONG = "Model {0} - Error when running inference: {1}"
RECURSIVE_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
    model_transaction_policy { decoupled: true }
"""
RECURSIVE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="recursive", requested_output_names=["OUT"], inputs=request.inputs()
            )
            async for response in await call.async_exec(decoupled=True):
                if response.has_error():
                    request.get_response_sender().send(pb_utils.InferenceResponse(error=response.error()), 1)
"""
SCRIPTS = {
    "shown(call('echo', 1, 2).exec())": "[[1.0, 2.0]]",
    "shown(call('echo', 1, outputs=[]).exec())": "[[1.0]]",
    "shown(call('echo', 1, model_version=1).exec())": "[[1.0]]",
    "call('echo', 1).exec().output_tensors()[0].as_numpy().flags.writeable": "True",
    "shown(call('echo', 1, outputs=['X']).exec())": WRONG.format(
        "echo", "unexpected inference output 'X' for model 'echo', allowed outputs are: OUT"
    ),
    "shown(call('fails', 1).exec())": "no luck",
    "shown(call('nope', 1).exec())": WRONG.format("nope", UNKNOWN),
    "shown(call('echo', 1, model_version=7).exec())": WRONG.format("echo", NOT_READY.format("echo")),
    "shown(call('echo', 1, model_version=-3).exec())": WRONG.format("echo", NOT_READY.format("echo")),
    "shown(call('stream', 1).exec())": WRONG.format("stream", DECOUPLED),
    "[shown(one) for one in call('stream', 2).exec(decoupled=True)]": "[[[2.0]], [[3.0]], []]",
    "[shown(one) for one in call('stream', 2, 0).exec(decoupled=True)]": "[[[2.0, 0.0]], [[3.0, 1.0]]]",
    "[shown(one) for one in call('stream', 0).exec(decoupled=True)]": "[[]]",
    "[shown(one) for one in call('echo', 3).exec(decoupled=True)]": "[[[3.0]]]",
    "[shown(one) for one in call('fails', 3).exec(decoupled=True)]": "['no luck']",
    "[shown(one) for one in call('nope', 3).exec(decoupled=True)]": "["
    + repr(WRONG.format("nope", UNKNOWN))
    + "]",
    "(lambda all: (len(list(all)), len(list(all)), raised(lambda: next(all))))"
    "(call('stream', 3).exec(decoupled=True))": (
        "(4, 4, 'StopIteration: Iteration is done for the responses.')"
    ),
    "(lambda all: (shown(next(all)), len(list(all)), len(list(all))))"
    "(call('stream', 3, 0).exec(decoupled=True))": "([[3.0, 0.0]], 2, 3)",
    "(lambda all: (len(list(all)), shown(next(iter(all))), len(list(all)), len(list(all))))"
    "(call('stream', 3, 0).exec(decoupled=True))": "(3, [[3.0, 0.0]], 2, 3)",
    "(lambda all: ([shown(one) for one, _ in zip(all, range(1))], len(list(all))))"
    "(call('echo', 3).exec(decoupled=True))": "([[[3.0]]], 1)",
    "raised(lambda: call('echo', 1, correlation_id=1.5))": (
        "TritonModelException: Correlation ID must be integer or string"
    ),
    "raised(lambda: call('echo', 1, parameters={'a': 1.5}))": (
        "TritonModelException: Expect parameters values to have type bool/int/str, found type <class 'float'>"
    ),
    "raised(lambda: call('echo', 1, parameters={1: 1}))": (
        "TritonModelException: Expect parameters keys to have type str, found type <class 'int'>"
    ),
    "raised(lambda: call('echo', 1).async_exec())": "RuntimeError: no running event loop",
    "pb_utils.is_model_ready('echo'), pb_utils.is_model_ready('echo', '1')": "(True, True)",
    "pb_utils.is_model_ready('echo', '7'), pb_utils.is_model_ready('nope')": "(False, False)",
    "raised(lambda: pb_utils.load_model('nope'))": (
        "TritonModelException: Failed to load model: Failed to process the request for model 'script_0', "
        "message: failed to load 'nope', failed to poll from model repository"
    ),
    "pb_utils.unload_model('nope')": "None",
    "request.requested_output_names(), call('echo', 1).requested_output_names()": "({'OUT'}, {'OUT'})",
    "shown(pb_utils.InferenceRequest('i', 0, call('echo', 1).inputs(), ['OUT'], 'echo', -1, 0, 0).exec())": (
        "[[1.0]]"
    ),
    "request.set_flags(3), request.flags(), request.set_flags(0), request.flags()": "(None, 3, None, 0)",
    "[pb_utils.serialize_byte_tensor(np.zeros(0, dtype)) for dtype in (object, float)]": "[(), ()]",
    "raised(lambda: pb_utils.deserialize_bytes_tensor(bytes([5, 0, 0, 0, 97]))).split(':')[0]": "error",
    "raised(lambda: pb_utils.InferenceResponse([None]))": (
        "TritonModelException: Output tensor for inference response should not be empty."
    ),
    "[raised(each).split(':')[0] for each in (lambda: pb_utils.InferenceResponse([1]), "
    "lambda: pb_utils.InferenceResponse(None), lambda: pb_utils.InferenceResponse([], 'text'), "
    "lambda: pb_utils.Tensor('Y', None), lambda: pb_utils.TritonError('m', 99), "
    "lambda: pb_utils.InferenceRequest('echo', ['OUT'], []))]": repr(["TypeError"] * 6),
}
"""Scripts, and the answers of Triton 2.51 to the same."""

COROUTINES = {
    "shown(await call('echo', 1).async_exec())": "[[1.0]]",
    "shown(await call('fails', 1).async_exec())": "no luck",
    "shown(await call('nope', 1).async_exec())": WRONG.format("nope", UNKNOWN),
    "shown(await call('stream', 1).async_exec())": WRONG.format("stream", DECOUPLED),
    "[shown(one) for one in await call('stream', 2).async_exec(decoupled=True)]": "[[[2.0]], [[3.0]], []]",
    "[shown(one) for one in await asyncio.gather(*[call('echo', n).async_exec() for n in range(100)])]": str(
        [[[float(number)]] for number in range(100)]
    ),
    "sum([[len(list(one)) for one in await asyncio.gather("
    "*[call('stream', n).async_exec(decoupled=True) for n in range(5)])]], [])": "[1, 2, 3, 4, 5]",
}
"""The same for coroutines."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("calling")
    write_callers(repository)
    write_until_cancelled(repository)
    write_script(repository, "two", "instance_group { count: 2 kind: KIND_CPU }")
    write_script(
        repository, "short", 'parameters { key: "CONCH_MAX_QUEUE_SIZE" value { string_value: "1" } }'
    )
    write_model(repository, "recursive", RECURSIVE_CONFIG, {"model.py": RECURSIVE})
    # Apart from the others where those run in workers.
    write_script(
        repository, "apart", 'parameters { key: "CONCH_PLACEMENT" value { string_value: "in_process" } }'
    )
    return repository


server = server_fixture(flags=[*LOAD_ALL, "--disable-auto-complete-config"], placed=True)


@pytest.mark.parametrize("code", SCRIPTS)
def test_exec(client: triton.InferenceServerClient, code: str) -> None:
    assert run(client, f"result = {code}") == SCRIPTS[code]


@pytest.mark.parametrize("code", COROUTINES)
def test_async_exec(client: triton.InferenceServerClient, code: str) -> None:
    assert run(client, f"return {code}", "coroutine") == COROUTINES[code]


def test_responses_in_a_coroutine_as_they_come(client: triton.InferenceServerClient) -> None:
    code = (
        "all = await call('stream', 3).async_exec(decoupled=True)\n"
        "first = [shown(one) async for one in all]\n"
        "return first == [shown(one) async for one in all] and len(first)"
    )
    assert run(client, code, "coroutine") == "4"


def test_the_loop_goes_on_until_the_first_response(
    client: triton.InferenceServerClient, tmp_path: Path
) -> None:
    released = str(tmp_path / "released")
    waits = (
        "import os\n"
        "end = time.monotonic() + 300\n"
        f"while not os.path.exists({released!r}) and time.monotonic() < end: time.sleep(0.002)\n"
        f"result = os.path.exists({released!r})"
    )
    code = (
        f"async def release(): open({released!r}, 'w').close()\n"
        f"made, task = texts('script', {waits!r}), asyncio.create_task(release())\n"
        "return [shown(one) for one in await made.async_exec(decoupled=True)]"
    )
    assert run(client, code, "coroutine") == "[[[b'True']]]"


def test_the_other_model_sees_the_request(client: triton.InferenceServerClient) -> None:
    code = (
        "response = call('seen', 1, request_id='i', correlation_id=3, flags=3, timeout=77,\n"
        "    parameters={'a': 1, 'b': 'x', 'c': True}).exec()\n"
        "result = response.output_tensors()[0].as_numpy()[0].decode()\n"
        "assert len(response.output_tensors()) == 1"
    )
    assert json.loads(run(client, code)) == ["i", 3, 3, 77, {"a": 1, "b": "x", "c": True}, ["OUT"]]
    code = code.replace("correlation_id=3", "correlation_id='three'")
    assert json.loads(run(client, code))[1] == "three"


def test_codes_of_errors(client: triton.InferenceServerClient) -> None:
    assert (
        run(client, "result = call('fails', 1).exec().error().code() == pb_utils.TritonError.NOT_FOUND")
        == "True"
    )
    code = "call('echo', 1, outputs=['X']).exec().error().code() == pb_utils.TritonError.INVALID_ARG"
    assert run(client, f"result = {code}") == "True"


def test_text_goes_to_another_model_and_comes_back(client: triton.InferenceServerClient) -> None:
    code = (
        "inner = np.array(['result = \"ä\"'], object)\n"
        "inputs = [pb_utils.Tensor('IN', inner)]\n"
        "made = pb_utils.InferenceRequest(model_name='two', requested_output_names=['OUT'], inputs=inputs)\n"
        "result = made.exec().output_tensors()[0].as_numpy()[0].decode()"
    )
    assert run(client, code) == "ä"


def test_answers_belong_to_the_caller(client: triton.InferenceServerClient) -> None:
    code = (
        "tensor = call('echo', 1, 2).inputs()[0]\n"
        "made = pb_utils.InferenceRequest(\n"
        "    model_name='echo', requested_output_names=['OUT'], inputs=[tensor])\n"
        "first, second = [made.exec().output_tensors()[0].as_numpy() for _ in range(2)]\n"
        "first[0] = 9\n"
        "result = tensor.as_numpy().tolist(), second.tolist()"
    )
    assert run(client, code) == "([1.0, 2.0], [1.0, 2.0])"


@pytest.mark.parametrize(
    "code",
    [
        "with ThreadPoolExecutor(4) as pool:\n"
        "    result = list(pool.map(lambda n: shown(call('echo', n).exec()), range(3)))",
        "made = [call('echo', n) for n in range(3)]\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    result = [shown(one) for one in pool.map(pb_utils.InferenceRequest.exec, made)]",
        "async def work():\n"
        "    calls = [call('echo', n).async_exec() for n in range(3)]\n"
        "    return [shown(one) for one in await asyncio.gather(*calls)]\n"
        "result = asyncio.run(work())",
    ],
)
def test_threads_and_loops_of_a_model(client: triton.InferenceServerClient, code: str) -> None:
    assert run(client, code) == "[[[0.0]], [[1.0]], [[2.0]]]"


def nested(*models: str) -> str:
    """Code that calls models which each call the next one."""
    code = "result = 'end'"
    for model in reversed(models):
        code = (
            f"text = np.array([{code!r}.encode()], object)\n"
            f"made = pb_utils.InferenceRequest(model_name={model!r}, requested_output_names=['OUT'],\n"
            f"    inputs=[pb_utils.Tensor('IN', text)])\n"
            f"response = made.exec()\n"
            f"if response.has_error(): raise ValueError(response.error().message())\n"
            f"result = response.output_tensors()[0].as_numpy()[0].decode()"
        )
    return code


def test_models_may_call_themselves_while_they_have_instances(client: triton.InferenceServerClient) -> None:
    for _ in range(5):  # from the second time on the batches are known to be short, and led
        assert run(client, nested("script", "two"), "two") == "end"


@pytest.mark.parametrize(
    "models",
    [("script",), ("two", "two", "script"), ("short", "script"), ("two", "two"), ("apart", "script")],
)
def test_calls_that_nobody_could_serve_fail(
    client: triton.InferenceServerClient, models: tuple[str, ...]
) -> None:
    first = "two" if models == ("two", "two") else "script"
    said = run(client, nested(*models), first)
    assert f"model '{models[-1]}' can't run this call: all of its instances wait" in said
    assert run(client, "result = 1", first) == "1"


def test_a_model_that_calls_itself_without_end(client: triton.InferenceServerClient) -> None:
    inputs = [tensor("IN", np.ones(1, np.float32))]
    for _ in range(2):
        with pytest.raises(InferenceServerException) as raised:
            client.infer("recursive", inputs, client_timeout=WAIT_S)
        assert "model 'recursive' is called within 100 requests: it calls itself" in raised.value.message()
        assert run(client, "result = 1") == "1"


@pytest.mark.process
@pytest.mark.parametrize("how", ["exec()", "exec(decoupled=True)", "async_exec()"])
def test_a_forked_process_can_not_call(client: triton.InferenceServerClient, how: str) -> None:
    calls = {
        "exec()": "call('echo', 1).exec()",
        "exec(decoupled=True)": "next(made)",  # an iterator of the model's, whose answers come there
        "async_exec()": "asyncio.run(work())",
    }
    code = (
        "import multiprocessing\n"
        "async def work(): return await call('echo', 1).async_exec()\n"
        "made = call('endless', 1, request_id='forked').exec(decoupled=True)\n"
        "next(made)\n"
        "context = multiprocessing.get_context('fork')\n"
        "theirs, ours = context.Pipe()\n"
        f"child = context.Process(target=lambda: theirs.send(raised(lambda: {calls[how]})))\n"
        "child.start()\n"
        "result = ours.poll(10) and ours.recv()\n"
        "child.kill()\n"
        "child.join()\n"
        "for each in (child, theirs, ours): each.close()\n"
        "made.cancel()"
    )
    said = run(client, code)
    forked = "a process that model instance 'script_0' has forked can't call the server"
    assert said.startswith(f"TritonModelException: {forked}")


def test_streams_that_nobody_could_serve_fail(client: triton.InferenceServerClient) -> None:
    said = run(client, "result = shown(next(texts('script', 'result = 1').exec(decoupled=True)))")
    assert "model 'script' can't run this call: all of its instances wait" in said
    assert run(client, "result = 1") == "1"


def test_a_full_queue_is_an_answer(client: triton.InferenceServerClient, tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    held = f"import os\nwhile not os.path.exists({go!r}): time.sleep(0.002)\nresult = 0"
    code = (
        f"made = texts('short', {held!r})\n"
        "calls = [made.async_exec() for _ in range(20)]\n"
        "await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)\n"
        f"open({go!r}, 'w').close()\n"
        "all = await asyncio.gather(*calls)\n"
        "refused = [one.error() for one in all if one.has_error()]\n"
        "return len(refused) < 20 and {(one.code(), 'queue' in one.message()) "
        "for one in refused}"
    )
    assert run(client, code, "coroutine") == "{(4, True)}"


def test_a_deadline_ends_the_waiting(client: triton.InferenceServerClient, repository: Path) -> None:
    files = repository / "endless"
    code = (
        "while True:\n"
        "    try:\n"
        "        list(call('endless', 1, request_id='deadline').exec(decoupled=True))\n"
        "    except Exception:\n"
        "        pass"
    )

    def late(seconds: float) -> None:
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            run(client, code, client_timeout=seconds)

    past_deadline(late, (files / "deadline.runs").exists)
    eventually((files / "deadline.cancelled").exists, "the other model is cancelled")
    assert run(client, "result = 1") == "1"


def test_nobody_who_waits_ends_the_waiting(
    server: AnyServer, client: triton.InferenceServerClient, repository: Path
) -> None:
    files = repository / "endless"
    with client_of(server) as other:
        for model, code in (
            ("script", "list(call('endless', 1, request_id='gone-script').exec(decoupled=True))"),
            (
                "coroutine",
                "async for one in await call('endless', 1, request_id='gone-coroutine')"
                ".async_exec(decoupled=True): pass",
            ),
        ):
            inputs = [tensor("IN", np.array([code.encode()], object), "BYTES")]
            call = other.async_infer(model, inputs, lambda result, error: None)
            eventually((files / f"gone-{model}.runs").exists, "it runs")
            call.cancel()
            eventually((files / f"gone-{model}.cancelled").exists, "it is cancelled")
            assert run(client, f"{'result =' if model == 'script' else 'return'} 1", model) == "1"


def test_an_iterator_cancels(client: triton.InferenceServerClient, repository: Path) -> None:
    code = (
        "all = call('endless', 5, request_id='iterator').exec(decoupled=True)\n"
        "first = shown(next(all))\n"
        "all.cancel()\n"
        "result = first, [shown(one) for one in all]"
    )
    assert run(client, code) == "([[5.0]], [[]])"
    assert (repository / "endless" / "iterator.cancelled").exists()


def test_a_cancelled_task_cancels_its_call(client: triton.InferenceServerClient, tmp_path: Path) -> None:
    runs = str(tmp_path / "runs")
    inner = f"open({runs!r}, 'w').close()\nwhile not request.is_cancelled(): time.sleep(0.002)\nresult = 0"
    code = (
        "import os\n"
        f"made = texts('script', {inner!r})\n"
        "async def work(): return await made.async_exec()\n"
        "task = asyncio.create_task(work())\n"
        f"while not os.path.exists({runs!r}): await asyncio.sleep(0.002)\n"
        "task.cancel()\n"
        "return await asyncio.gather(task, return_exceptions=True)"
    )
    assert run(client, code, "coroutine") == "[CancelledError('')]"
    assert run(client, "result = 1") == "1"


def test_calls_count_as_requests(client: triton.InferenceServerClient) -> None:
    def counted() -> int:
        statistics = client.get_inference_statistics("echo", "1", as_json=True)
        return int(statistics["model_stats"][0].get("inference_count", 0))

    before = counted()
    assert run(client, "result = [call('echo', 1).exec() for _ in range(3)] and 1") == "1"
    assert counted() == before + 3


def test_a_model_loads_others(client: triton.InferenceServerClient, repository: Path) -> None:
    code = (
        "ready = lambda: pb_utils.is_model_ready('fails')\n"
        "pb_utils.unload_model('fails')\n"
        "gone = ready()\n"
        "pb_utils.load_model('fails')\n"
        "result = gone, ready(), raised(lambda: pb_utils.load_model('fails', files={'file:1/model.py': 'x'}))"
    )
    said = run(client, code)
    assert said == "(False, True, \"TypeError: Object of type 'str' is not an instance of 'bytes'\")"
    config = (repository / "echo" / "config.pbtxt").read_text()
    assert "FP32" in config
    model = (repository / "fails" / "1" / "model.py").read_text().replace("no luck", "replaced")
    override = {
        "backend": "python",
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
    code = (
        f"files = {{'file:1/model.py': {model.encode()!r}}}\n"
        f"pb_utils.load_model('fails', config={json.dumps(override)!r}, files=files)\n"
        "result = shown(call('fails', 1).exec())\n"
        "pb_utils.unload_model('fails')\n"
        "pb_utils.load_model('fails')\n"
        "result = result, shown(call('fails', 1).exec())"
    )
    assert run(client, code) == "('replaced', 'no luck')"


def test_a_model_reloads_and_unloads_itself(client: triton.InferenceServerClient, repository: Path) -> None:
    write_script(repository, "suicidal")
    client.load_model("suicidal")
    (repository / "suicidal" / "1" / "more.py").write_text("x = 1\n")
    assert run(client, "pb_utils.load_model('suicidal'); result = 'reloaded'", "suicidal") == "reloaded"
    assert run(client, "pb_utils.unload_model('suicidal'); result = 'unloaded'", "suicidal") == "unloaded"
    assert not client.is_model_ready("suicidal")
    with suppress(FileNotFoundError):
        (repository / "suicidal" / "1" / "more.py").unlink()


INITIALIZES = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        pb_utils.load_model({other!r})

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for request in requests]
"""
PLAIN = 'backend: "python" input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } \
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }'


def test_loads_while_a_model_is_loaded(tmp_path: Path, placement: str) -> None:
    for name, other in {"a": "b", "b": "c", "self": "self", "x": "y", "y": "z", "z": "x"}.items():
        write_model(tmp_path, name, PLAIN, {"model.py": INITIALIZES.format(other=other)})
    write_script(tmp_path, "c")
    flags = ["--model-control-mode=explicit", "--model-load-thread-count=1", placement]
    with serving(tmp_path, flags=flags) as server, client_of(server) as client:
        client.load_model("a", client_timeout=WAIT_S)
        assert [client.is_model_ready(name) for name in "abc"] == [True] * 3
        for name in ("self", "x"):
            with pytest.raises(InferenceServerException, match="its load would wait for that"):
                client.load_model(name, client_timeout=WAIT_S)


OUTSIDE = """
import asyncio
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.said = Path(args["model_repository"]) / "said"
        assert pb_utils.is_model_ready("echo")
        tensor = pb_utils.Tensor("IN", np.ones(1, np.float32))
        self.made = pb_utils.InferenceRequest("", 0, [tensor], ["OUT"], "echo")
        if not self.said.exists():
            self.made.exec()

    def execute(self, requests):
        return [pb_utils.InferenceResponse(self.made.exec().output_tensors()) for _ in requests]

    def finalize(self):
        async def wait():
            await self.made.async_exec()

        for call in (self.made.exec, lambda: self.made.exec(decoupled=True), lambda: asyncio.run(wait())):
            try:
                call()
            except pb_utils.TritonModelException as error:
                with self.said.open("a") as said:
                    said.write(f"{error}\\n")
"""


def test_calls_are_for_execute_only(tmp_path: Path, placement: str) -> None:
    write_callers(tmp_path)
    said = write_model(tmp_path, "outside", PLAIN, {"model.py": OUTSIDE}) / "said"
    text = "BLS is only supported during the 'execute' function."
    flags = ["--model-control-mode=explicit", placement]
    with serving(tmp_path, flags=flags) as server, client_of(server) as client:
        client.load_model("echo")
        with pytest.raises(InferenceServerException, match=re.escape(text)):
            client.load_model("outside")
        said.touch()
        client.load_model("outside")
        answer = client.infer("outside", [tensor("IN", np.zeros(1, np.float32))])
        assert answer.as_numpy("OUT").tolist() == [1.0]
        client.unload_model("outside")
        eventually(lambda: said.read_text() == f"{text}\n" * 3, "three calls were refused")


def test_loading_is_not_always_allowed(tmp_path: Path) -> None:
    write_script(tmp_path)
    with serving(tmp_path) as server, client_of(server) as client:
        said = run(client, "result = raised(lambda: pb_utils.load_model('script'))")
    assert said.endswith(
        "explicit model load / unload is not allowed if polling is enabled; the model control mode is "
        "'none', and --model-control-mode=explicit allows it"
    )
