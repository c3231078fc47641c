#!/usr/bin/env bash
# xllamacpp 2026.10.11549 (llama.cpp's server in a process): the mean embedding of a text depends on the texts
# that are sent with it.
#
# Expected: a text has the vector that it has alone, up to rounding.
# Seen: with two slots (`n_parallel`), each with a cache of its own, a text of 26 tokens beside one of 5 has
# another vector: components of the vector of length 1 differ by more than 0.01, and there is no error. A step
# takes as many tokens of each text, so the longer one comes in several, and the mean is that of the last one.
# With one cache for all slots (`kv_unified`) the vectors are equal.
#
# Ends with 0 while that is so, with 1 if it has changed. Needs Python 3.11 and pip.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PROGRAM'
import json
import string

import numpy as np
import xllamacpp
from gguf import GGUFWriter

WIDTH, INNER, HEADS = 64, 128, 4
tokens = ["<unk>", "<s>", "</s>", *string.ascii_lowercase]
random = np.random.default_rng(7)


def matrix(rows, columns):
    return random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)


writer = GGUFWriter("model.gguf", "llama")
writer.add_context_length(512)
writer.add_embedding_length(WIDTH)
writer.add_block_count(1)
writer.add_feed_forward_length(INNER)
writer.add_head_count(HEADS)
writer.add_head_count_kv(HEADS)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(WIDTH // HEADS)
writer.add_tokenizer_model("llama")
writer.add_token_list(tokens)
writer.add_token_scores([0.0] * len(tokens))
writer.add_token_types([2, 3, 3, *[1] * 26])
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)
for name, array in {
    "token_embd.weight": matrix(len(tokens), WIDTH),
    **{f"blk.0.attn_{each}.weight": matrix(WIDTH, WIDTH) for each in ("q", "k", "v", "output")},
    "blk.0.ffn_gate.weight": matrix(INNER, WIDTH),
    "blk.0.ffn_up.weight": matrix(INNER, WIDTH),
    "blk.0.ffn_down.weight": matrix(WIDTH, INNER),
    "blk.0.attn_norm.weight": np.ones(WIDTH, np.float32),
    "blk.0.ffn_norm.weight": np.ones(WIDTH, np.float32),
    "output_norm.weight": np.ones(WIDTH, np.float32),
    "output.weight": matrix(len(tokens), WIDTH),
}.items():
    writer.add_tensor(name, array)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

texts = [[3 + number for number in range(5)], [3 + number for number in range(26)]]


def difference(unified):
    """The largest difference of a component of the longer text's vector, alone and beside the other."""
    given = xllamacpp.CommonParams()
    given.model.path = "model.gguf"
    given.n_ctx, given.n_parallel, given.kv_unified, given.verbosity = 1024, 2, unified, 0
    given.embedding = True
    given.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    server = xllamacpp.Server(given)

    def vectors(inputs):
        found = json.loads(server.handle_embeddings(json.dumps({"input": inputs})))["data"]
        return [np.array(each["embedding"]) for each in sorted(found, key=lambda each: each["index"])]

    return float(np.abs(vectors(texts)[1] - vectors(texts[1:])[0]).max())


apart, together = difference(False), difference(True)
print(f"xllamacpp: slots with a cache of their own differ by {apart:.4f}, with one cache by {together:.4f}")
assert apart > 0.01 and together < 0.001, "this has changed"
PROGRAM
