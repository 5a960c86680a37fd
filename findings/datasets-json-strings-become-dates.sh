#!/usr/bin/env bash
# Guess: a string of a JSON Lines file is a string of the dataset. JSON has no dates.
# Fact: Arrow's JSON reader takes a column for timestamps if every string of it looks like one. An answer "2024-01-01"
#   becomes a datetime, str() of which ("2024-01-01 00:00:00") is another text. It depends on the other rows: one answer
#   that is not a date keeps all as they are. So a subset (dates only, or a first shard) trains on other text than the
#   whole.
# Source: pyarrow 25.0.1 (Arrow C++, json/converter: strings are tried as timestamps, "YYYY-MM-DD[ hh:mm:ss]"); datasets
#   5.2.0, packaged_modules/json/json.py:Json._generate_tables.
# Remedy: features=Features({"answer": Value("string")}).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q datasets==5.2.0 pyarrow==25.0.1
cat > "$work/show.py" <<'PY'
import json

import datasets

datasets.disable_progress_bars()
for name, answers in (("dates", ["2024-01-01", "2025-06-30"]), ("mixed", ["2024-01-01", "in June"])):
    path = f"{name}.jsonl"
    with open(path, "w") as file:
        file.writelines(json.dumps({"answer": answer}) + "\n" for answer in answers)
    loaded = datasets.load_dataset("json", data_files=path, split="train")
    print(name, loaded.features["answer"].dtype, "|", loaded[0]["answer"])
PY
cd "$work"
HF_HOME=$work/home venv/bin/python show.py | tee seen
diff "$work/seen" - <<'SEEN'
dates timestamp[s] | 2024-01-01 00:00:00
mixed string | 2024-01-01
SEEN
