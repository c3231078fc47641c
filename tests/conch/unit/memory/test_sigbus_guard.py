"""Regions that shrink while they are used, in processes that would die of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.process

_START = """
import ctypes, faulthandler, hashlib, mmap, os, signal, sys, threading
import numpy as np
from conch.core.errors import InvalidArgumentError
from conch.memory.sigbus_guard import process_guard
from conch.memory.regions import Regions

SIZE = 256 * 1024
KEY = f"test-{os.getpid()}"
PATH = f"/dev/shm/{KEY}"
descriptor = os.open(PATH, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
shrink_to = 0

def shrunk(work, size=SIZE, to=0):
    # Registers a region, shrinks it, works on it, and sees that the region knows.
    os.ftruncate(descriptor, size)
    regions = Regions()
    regions.register_system("r", KEY, 0, size)
    region = regions.acquire_region("r")
    tensor = region.tensor(0, size, "x", "UINT8", (size,))
    os.ftruncate(descriptor, to)
    work(region, tensor)
    os.ftruncate(descriptor, size)  # it looks like before
    try:
        region.check()
    except InvalidArgumentError as error:
        assert "has lost its memory" in error.message and "no room left" in error.message, error
    else:
        raise AssertionError("nobody has noticed")
    regions.release_region(region)
    regions.close()
"""


def run(script: str, *, code: int = 0, rounds: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own, and sees how that ends."""
    body = textwrap.indent(textwrap.dedent(script), "    ")
    whole = f"ROUNDS = {rounds}\n{_START}\ntry:\n{body}\nfinally:\n    os.unlink(PATH)\n"
    result = subprocess.run(
        [sys.executable, "-c", whole], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == code, f"{result.returncode}: {result.stdout}{result.stderr}"
    return result


WORK = {
    "bytes": "lambda region, tensor: bytes(tensor.data)",
    "join": "lambda region, tensor: b''.join([b'x', tensor.data])",
    "copy": "lambda region, tensor: tensor.numpy().copy()",
    "copyto": "lambda region, tensor: np.copyto(np.empty(SIZE, np.uint8), tensor.numpy())",
    "sum": "lambda region, tensor: tensor.numpy().sum()",
    "hash": "lambda region, tensor: hashlib.sha256(tensor.data).digest()",
    "matmul": "lambda region, tensor: tensor.numpy().view('f4').reshape(256, -1) @ np.ones((256, 256), 'f4')",
    "slice": "lambda region, tensor: region.buffer(0, SIZE).__setitem__(slice(None), bytes(SIZE))",
    "write": "lambda region, tensor: region.write(0, SIZE, Tensor.from_array('y', np.ones(SIZE, 'u1')))",
    "one byte": "lambda region, tensor: tensor.data[SIZE - 1]",
}


@pytest.mark.parametrize("rounds", [30, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WORK)
def test_a_thread_that_touches_what_is_gone_goes_on(name: str, rounds: int) -> None:
    script = f"""
        from conch.core.tensor import Tensor
        for round in range({rounds}):
            shrunk({WORK[name]})
        assert not process_guard().installed
    """
    run(script)


def test_zeros_are_read_and_what_was_read_before_stays() -> None:
    run(
        """
        def work(region, tensor):
            array = tensor.numpy()
            assert array[:4096].sum() == 0 and array.sum() == 0
            region.write(0, 4096, Tensor.from_array("y", np.ones(4096, "u1")))
            assert array.sum() == 4096
        from conch.core.tensor import Tensor
        shrunk(work)
        """
    )


@pytest.mark.parametrize("rounds", [30, pytest.param(3000, marks=pytest.mark.slow)])
def test_onnx_runtime_reads_on_its_own_threads(rounds: int) -> None:
    run(
        """
        import onnx, onnxruntime
        from onnx import TensorProto, helper
        tensors = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [256, 256]) for n in "xy"]
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "x"], ["z"]), helper.make_node("Sqrt", ["z"], ["y"])],
            "g", tensors[:1], tensors[1:],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 4
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        for round in range(ROUNDS):
            shrunk(lambda _, tensor: session.run(None, {"x": tensor.numpy().view("f4").reshape(256, 256)}))
        """,
        rounds=rounds,
    )


@pytest.mark.parametrize("rounds", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_threads_and_regions_that_shrink_in_the_middle(rounds: int) -> None:
    run(
        """
        from conch.core.tensor import Tensor
        def work(number):
            key = f"{KEY}-{number}"
            own = os.open(f"/dev/shm/{key}", os.O_CREAT | os.O_RDWR, 0o600)
            regions = Regions()
            try:
                for round in range(ROUNDS):
                    os.ftruncate(own, SIZE)
                    regions.register_system("r", key, 0, SIZE)
                    region = regions.acquire_region("r")
                    tensor = region.tensor(0, SIZE, "x", "UINT8", (SIZE,))
                    shrinker = threading.Thread(target=os.ftruncate, args=(own, 0))
                    shrinker.start()
                    for _ in range(4):
                        bytes(tensor.data)
                        tensor.numpy().copy()
                        hashlib.sha256(tensor.data).digest()
                        region.write(0, SIZE, Tensor.from_array("y", np.ones(SIZE, "u1")))
                    shrinker.join()
                    try:
                        region.check()
                    except InvalidArgumentError:
                        pass
                    else:
                        raise AssertionError("nobody has noticed")
                    del tensor
                    regions.release_region(region)
                    regions.unregister_system("r")
                    done[number] += 1
            finally:
                os.close(own)
                os.unlink(f"/dev/shm/{key}")
        done = [0] * 8
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert done == [ROUNDS] * 8, done
        assert not process_guard().installed
        """,
        rounds=rounds,
    )


def test_where_memory_is_short_it_goes_on_page_by_page() -> None:
    """As where the system lets processes have no more than there is."""
    run(
        """
        mapped = []
        class Mmap:
            def __call__(self, start, length, *more):
                mapped.append(length)
                return None if length > mmap.PAGESIZE else real(start, length, *more)
            def __setattr__(self, name, value): setattr(real, name, value)
        class Short(ctypes.PyDLL):
            mmap = Mmap()
        real = ctypes.PyDLL(None).mmap
        ctypes.PyDLL = Short
        shrunk(lambda region, tensor: bytes(tensor.data))
        assert mapped == [SIZE, mmap.PAGESIZE] * (SIZE // mmap.PAGESIZE), len(mapped)
        """
    )


def test_other_faults_end_the_process_as_before() -> None:
    script = """
        faulthandler.enable()
        os.ftruncate(descriptor, SIZE)
        regions = Regions()
        regions.register_system("r", KEY, 0, SIZE)
        other = mmap.mmap(descriptor, SIZE)
        os.ftruncate(descriptor, 0)
        os.unlink(PATH)
        other[SIZE - 1]
    """
    result = run(script, code=-7)
    assert "Fatal Python error: Bus error" in result.stderr


def test_a_signal_from_a_process_ends_it_as_before() -> None:
    script = """
        os.ftruncate(descriptor, SIZE)
        regions = Regions()
        regions.register_system("r", KEY, 0, SIZE)
        os.unlink(PATH)
        os.kill(os.getpid(), signal.SIGBUS)
        threading.Event().wait(20)
    """
    run(script, code=-7)


def test_the_signal_is_taken_again_from_whoever_took_it_since() -> None:
    run(
        """
        os.ftruncate(descriptor, SIZE)
        guard = process_guard()
        first, second = Regions(), Regions()
        first.register_system("r", KEY, 0, SIZE)
        assert guard.installed
        faulthandler.enable()
        assert not guard.installed
        shrunk(lambda region, tensor: bytes(tensor.data))
        assert guard.installed  # for the first one
        first.close()
        assert not guard.installed
        """
    )
