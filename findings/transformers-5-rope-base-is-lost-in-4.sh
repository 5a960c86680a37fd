#!/usr/bin/env bash
# Guess: config.json of a Llama is one format. An older transformers reads what a newer one wrote, or refuses it.
# Fact: transformers 5 writes the base of rotary positions inside "rope_parameters" only. transformers 4 (4.57, its last
#   series, still pinned by many programs) reads "rope_theta" at the top, finds none, and takes 10000: every model of
#   Llama 3 (500000) computes with other positions, without an error. Any program that reads
#   config.get("rope_theta", 10000) does so. A rope scaling inside rope_parameters is lost in the same way.
# Source: transformers 5.23.0, modeling_rope_utils.py (rope_parameters); 4.57.6,
#   models/llama/configuration_llama.py:LlamaConfig.__init__ (rope_theta=10000.0).
# Remedy: write both spellings, rope_theta and rope_scaling at the top too.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version in 5.23.0 4.57.6; do
    "${PYTHON:-python3}" -m venv "$work/$version"
    "$work/$version/bin/pip" install -q --no-compile "transformers==$version"
done
cat > "$work/write.py" <<'PY'
import sys

from transformers import LlamaConfig

scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
LlamaConfig(rope_parameters=scaling).save_pretrained(sys.argv[1])
PY
cat > "$work/read.py" <<'PY'
import sys

import transformers

config = transformers.AutoConfig.from_pretrained(sys.argv[1])
base = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
scaling = config.rope_scaling
print(transformers.__version__, "base", base, "factor", scaling and scaling["factor"])
PY
"$work/5.23.0/bin/python" "$work/write.py" "$work/model" 2> "$work/log"
for version in 5.23.0 4.57.6; do
    "$work/$version/bin/python" "$work/read.py" "$work/model" 2> "$work/log" | tee -a "$work/seen"
done
diff "$work/seen" - <<'SEEN'
5.23.0 base 500000.0 factor 4.0
4.57.6 base 10000.0 factor None
SEEN
