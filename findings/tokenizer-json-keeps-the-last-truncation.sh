#!/usr/bin/env bash
# Guess: truncation and padding are arguments of a call. What save_pretrained writes does not depend on the last one.
# Fact: a call with truncation=True changes the shared Rust tokenizer, and save_pretrained writes its state to
#   tokenizer.json. transformers resets both in each call, so it reads the file as if nothing had happened. Everything
#   that loads tokenizer.json by tokenizers itself (data pipelines, servers, gigatoken's fallback) cuts each document to
#   the length of that call and pads it.
# Source: transformers 5.23.0, tokenization_utils_tokenizers.py:set_truncation_and_padding and _save_pretrained;
#   tokenizers 0.23.3, Tokenizer.from_file (applies "truncation" and "padding" of the file).
# Remedy: no_truncation() and no_padding() after Tokenizer.from_file.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile transformers==5.23.0 tokenizers==0.23.3
cat > "$work/show.py" <<'PY'
import tokenizers
from transformers import PreTrainedTokenizerFast

words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 1, "-": 2}, unk_token="?"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="-")
long, short = "a " * 100, "a"
for call in ("before", "after a call with truncation and padding"):
    tokenizer.save_pretrained("saved")
    lengths = [
        [len(tokenizers.Tokenizer.from_file("saved/tokenizer.json").encode(text).ids) for text in (long, short)],
        [len(PreTrainedTokenizerFast.from_pretrained("saved")(text).input_ids) for text in (long, short)],
    ]
    print(call, "| tokenizers", lengths[0], "| transformers", lengths[1])
    tokenizer(long, truncation=True, padding="max_length", max_length=8)
PY
cd "$work"
venv/bin/python show.py 2> log | tee seen
diff "$work/seen" - <<'SEEN'
before | tokenizers [100, 1] | transformers [100, 1]
after a call with truncation and padding | tokenizers [8, 8] | transformers [100, 1]
SEEN
