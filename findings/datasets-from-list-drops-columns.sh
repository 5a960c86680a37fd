#!/usr/bin/env bash
# Guess: Dataset.from_list keeps every key of every row, with None where a row has none, as a JSON Lines file does.
# Fact: the columns are the keys of the first row. A key that only later rows have is dropped from all of them without a
#   word: here the tools and the reasoning of conversations whose first row is a plain one. Written to a file and read by
#   load_dataset, the same rows keep all keys.
# Source: datasets 5.2.0, arrow_dataset.py:Dataset.from_list ("for k in mapping[0]").
# Remedy: give the first row all keys, or load_dataset("json").
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q datasets==5.2.0
cat > "$work/show.py" <<'PY'
import json

import datasets

datasets.disable_progress_bars()
rows = [
    {"prompt": "2+2?", "answer": "4"},
    {"prompt": "17*3?", "answer": "51", "reasoning": "17*3 = 30+21", "tools": ["calculator"]},
]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
print("from_list", datasets.Dataset.from_list(rows).column_names)
print("from_list, reversed", datasets.Dataset.from_list(rows[::-1]).column_names)
print("json", datasets.load_dataset("json", data_files="rows.jsonl", split="train").column_names)
PY
cd "$work"
HF_HOME=$work/home venv/bin/python show.py | tee seen
diff "$work/seen" - <<'SEEN'
from_list ['prompt', 'answer']
from_list, reversed ['prompt', 'answer', 'reasoning', 'tools']
json ['prompt', 'answer', 'reasoning', 'tools']
SEEN
