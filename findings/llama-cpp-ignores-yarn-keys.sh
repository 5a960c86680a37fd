#!/usr/bin/env bash
# Guess: the keys that GGUF defines for YaRN (rope.scaling.yarn_beta_fast, yarn_beta_slow, yarn_ext_factor,
#   yarn_attn_factor) change what llama.cpp computes. gguf-py has a method to write each.
# Fact: they change nothing for a llama. It reads type, factor, original_context_length and attn_factor, and takes betas
#   of 32 and 1: a model that was trained with other betas, or exported with another factor of attention by the key whose
#   name suggests it, runs with other positions than it was trained with. The same numbers as options of the server
#   (--yarn-beta-fast) do count.
# Source: gguf 0.19.0, gguf_writer.py (add_rope_scaling_yarn_*); llama.cpp as in xllamacpp 2026.10.11549,
#   src/llama-model.cpp (load_hparams) and llama-context.cpp (yarn_beta_fast from the parameters).
# Remedy: give the betas as options when the model is served; write attn_factor instead of yarn_attn_factor.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile gguf==0.19.0 numpy==2.4.6 xllamacpp==2026.10.11549
cat > "$work/show.py" <<'PY'
import sys

import gguf
import numpy as np
from xllamacpp import CommonParams, Server

width, inner, words = 64, 128, 256
base = {"type": "yarn", "factor": 4.0, "original_context_length": 2048}
options = {}
for key in sys.argv[1:]:
    name, value = key.split("=")
    (options if name.startswith("--") else base)[name.removeprefix("--")] = float(value)
writer = gguf.GGUFWriter("model.gguf", "llama")
for key, value in (("context_length", 8192), ("embedding_length", width), ("block_count", 1), ("vocab_size", words),
                   ("feed_forward_length", inner), ("attention.head_count", 4), ("attention.head_count_kv", 4)):
    writer.add_uint32(f"llama.{key}", value)
writer.add_layer_norm_rms_eps(1e-5)
for key, value in base.items():
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
    add(f"llama.rope.scaling.{key}", value)
writer.add_tokenizer_model("gpt2")
writer.add_token_list([f"t{number}" for number in range(words)])
writer.add_token_merges(["t 0"])
random = np.random.default_rng(0)
shapes = {"attn_q": (width, width), "attn_k": (width, width), "attn_v": (width, width), "attn_output": (width, width),
          "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
weights = {f"blk.0.{name}.weight": random.normal(0, 0.3, shape) for name, shape in shapes.items()}
weights |= {f"{name}.weight": random.normal(0, 0.3, (words, width)) for name in ("token_embd", "output")}
weights |= {f"{name}.weight": np.ones(width) for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")}
for name, weight in weights.items():
    writer.add_tensor(name, weight.astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
parameters = CommonParams()
parameters.model.path, parameters.n_ctx, parameters.n_parallel, parameters.warmup = "model.gguf", 512, 1, False
for name, value in options.items():
    setattr(parameters, name, value)
asked = {"prompt": list(range(2, 200)), "n_predict": 1, "n_probs": 1, "temperature": 0}
answer = Server(parameters).handle_completions(asked)["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]
print(*sys.argv[1:] or ["none"], answer["token"], round(answer["logprob"], 2))
PY
cd "$work"
for key in "" yarn_beta_fast=128 yarn_beta_slow=8 yarn_ext_factor=0.5 yarn_attn_factor=3 \
    --yarn_beta_fast=128 --yarn_beta_slow=8 --yarn_ext_factor=0.5 attn_factor=3; do
    venv/bin/python show.py ${key:+"$key"} 2> log | grep -E ' t[0-9]+ -' | tee -a seen
done
diff seen - <<'SEEN'
none t228 -1.72
yarn_beta_fast=128 t228 -1.72
yarn_beta_slow=8 t228 -1.72
yarn_ext_factor=0.5 t228 -1.72
yarn_attn_factor=3 t228 -1.72
--yarn_beta_fast=128 t40 -1.39
--yarn_beta_slow=8 t138 -1.0
--yarn_ext_factor=0.5 t47 -1.96
attn_factor=3 t38 -0.66
SEEN
