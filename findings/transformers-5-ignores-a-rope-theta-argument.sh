#!/usr/bin/env bash
# Guess: from_pretrained(path, rope_theta=1e6) changes the base of rotary positions, as other arguments change their keys
#   of config.json and as it did in transformers 4. It is the usual way to lengthen a context.
# Fact: in transformers 5 it is ignored, without a warning, if config.json has "rope_parameters", as every one that
#   transformers 5 writes. So is config.rope_theta = 1e6. A misspelt key would be kept and ignored in the same way.
#   The argument max_position_embeddings beside it takes effect, so that the longer context is there but not its base.
# Source: transformers 5.23.0, configuration_utils.py:PreTrainedConfig.from_dict (keeps arguments that are attributes) and
#   modeling_rope_utils.py (rope_parameters is read); 4.57.6, models/llama/modeling_llama.py (config.rope_theta).
# Remedy: pass rope_parameters with both rope_type and rope_theta.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile transformers==5.23.0
cat > "$work/show.py" <<'PY'
from transformers import AutoConfig, LlamaConfig

saved = {"rope_type": "default", "rope_theta": 500000.0}
LlamaConfig(rope_parameters=saved, max_position_embeddings=8192).save_pretrained("model")


def show(name, config):
    print(name, config.rope_parameters["rope_theta"], config.max_position_embeddings)


show("rope_theta to LlamaConfig", LlamaConfig(rope_theta=1e6, max_position_embeddings=32768))
show("as saved", AutoConfig.from_pretrained("model"))
show("rope_theta", AutoConfig.from_pretrained("model", rope_theta=1e6, max_position_embeddings=32768))
changed = {**saved, "rope_theta": 1e6}
show("rope_parameters", AutoConfig.from_pretrained("model", rope_parameters=changed, max_position_embeddings=32768))
PY
cd "$work"
venv/bin/python show.py 2> log | tee seen
diff seen - <<'SEEN'
rope_theta to LlamaConfig 1000000.0 32768
as saved 500000.0 8192
rope_theta 500000.0 32768
rope_parameters 1000000.0 32768
SEEN
