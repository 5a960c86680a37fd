#!/usr/bin/env bash
# Guess: a byte-level BPE tokenizer encodes every text: its alphabet is the 256 bytes.
# Fact: the trainer's alphabet is the bytes that the training text has. A byte that it did not have gets no token. It is
#   left out of the ids without an error, since such a tokenizer has no unknown token either: after training on plain
#   prose, code loses its brackets and prices lose their sign, in training data and in prompts.
# Source: tokenizers 0.23.3 (Rust), models/bpe/trainer.rs:compute_alphabet (initial_alphabet is empty by default) and
#   models/bpe/model.rs:merge_word (no id and no unk_token: nothing is added).
# Remedy: BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile tokenizers==0.23.3
cat > "$work/show.py" <<'PY'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

prose = ["the quick brown fox jumps over the lazy dog"] * 10
for name, alphabet in (("default", []), ("256 bytes", pre_tokenizers.ByteLevel.alphabet())):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(prose, trainer)
    for text in ("the fox", "f(x) = x[2] * 10", "The fox costs $5"):
        print(f"{name}: {text!r} becomes {tokenizer.decode(tokenizer.encode(text).ids)!r}")
PY
"$work/venv/bin/python" "$work/show.py" | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
default: 'the fox' becomes 'the fox'
default: 'f(x) = x[2] * 10' becomes 'fx  x  '
default: 'The fox costs $5' becomes 'he fox costs '
256 bytes: 'the fox' becomes 'the fox'
256 bytes: 'f(x) = x[2] * 10' becomes 'f(x) = x[2] * 10'
256 bytes: 'The fox costs $5' becomes 'The fox costs $5'
SEEN
