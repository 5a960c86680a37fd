#!/usr/bin/env bash
# Guess: Dataset.map computes again when the code that it calls has changed. Its documentation says that results are
#   cached by a fingerprint of the function, and an edit in the function itself is noticed.
# Fact: the fingerprint has functions of an imported module by their name only. After an edit of that module (here: the
#   cleaning in clean.py) the next process gets the texts of the previous version from the cache, without a word.
#   The same edit in the script that is run (__main__) is noticed: there functions are hashed by their code.
# Source: datasets 5.2.0, fingerprint.py:Hasher.hash and utils/_dill.py:Pickler; dill 0.4.1, _dill.py:save_function
#   (a function that can be imported is pickled by reference).
# Remedy: load_from_cache_file=False, or pass a version of the code in fn_kwargs.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q datasets==5.2.0 dill==0.4.1
cd "$work"
export HF_HOME=$work/home PYTHONDONTWRITEBYTECODE=1
echo '{"text": "Ab"}' > corpus.jsonl
cat > prepare.py <<'PY'
import datasets
from clean import in_module

datasets.disable_progress_bars()


def in_script(text):
    return text.upper()


corpus = datasets.load_dataset("json", data_files="corpus.jsonl", split="train")
for function in (in_module, in_script):
    print(function.__name__, corpus.map(lambda row: {"text": function(row["text"])})["text"][0])
PY
cat > clean.py <<'PY'
def in_module(text):
    return text.upper()
PY
{
    echo "first run"
    venv/bin/python prepare.py
    sed -i 's/upper/lower/' clean.py prepare.py
    echo "both functions edited: lower case"
    venv/bin/python prepare.py
} | tee seen
diff seen - <<'SEEN'
first run
in_module AB
in_script AB
both functions edited: lower case
in_module AB
in_script ab
SEEN
