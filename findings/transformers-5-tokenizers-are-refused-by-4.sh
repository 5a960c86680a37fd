#!/usr/bin/env bash
# Guess: a tokenizer without a class of its own (PreTrainedTokenizerFast, as most since 2024) that is loaded and saved
#   by a newer transformers stays the file that it was.
# Fact: transformers 5 writes its own class, "TokenizersBackend", and special tokens without a name as a list under
#   "extra_special_tokens". transformers 4 (4.57, its last series, still pinned by many programs) knows no such class, and
#   expects a mapping under that key: AutoTokenizer refuses a folder with either.
# Source: transformers 5.23.0, tokenization_utils_base.py:PreTrainedTokenizerBase.save_pretrained; 4.57.6,
#   models/auto/tokenization_auto.py:AutoTokenizer.from_pretrained,
#   tokenization_utils_base.py:_set_model_specific_special_tokens.
# Remedy: write "PreTrainedTokenizerFast", and the list under "additional_special_tokens": both series read these.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version in 5.23.0 4.57.6; do
    "${PYTHON:-python3}" -m venv "$work/$version"
    "$work/$version/bin/pip" install -q --no-compile "transformers==$version"
done
cat > "$work/write.py" <<'PY'
import json
import sys

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

folder = sys.argv[1]
backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(f"{folder}/class")
PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=["b"]).save_pretrained(f"{folder}/list")
for name, more in (("list", False), ("remedy", True)):
    with open(f"{folder}/list/tokenizer_config.json") as file:
        config = json.load(file)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if more:
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
        PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(f"{folder}/remedy")
    with open(f"{folder}/{name}/tokenizer_config.json", "w") as file:
        json.dump(config, file)
PY
cat > "$work/read.py" <<'PY'
import sys

import transformers

for name in ("class", "list", "remedy"):
    try:
        read = transformers.AutoTokenizer.from_pretrained(f"{sys.argv[1]}/{name}")
        seen = f"read, special tokens {read.all_special_tokens}"
    except Exception as error:
        seen = f"refused, {type(error).__name__}"
    print(transformers.__version__, name, seen)
PY
"$work/5.23.0/bin/python" "$work/write.py" "$work/model" 2> "$work/log"
for version in 5.23.0 4.57.6; do
    "$work/$version/bin/python" "$work/read.py" "$work/model" 2> "$work/log" | tee -a "$work/seen"
done
diff "$work/seen" - <<'SEEN'
5.23.0 class read, special tokens ['?']
5.23.0 list read, special tokens ['b']
5.23.0 remedy read, special tokens ['b']
4.57.6 class refused, ValueError
4.57.6 list refused, ImportError
4.57.6 remedy read, special tokens ['b']
SEEN
