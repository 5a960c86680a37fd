#!/usr/bin/env bash
# Guess: the arguments of a tool call are the same whether conversations come from a list in memory or from a file with
#   the same rows.
# Fact: from memory all calls share one Arrow struct. Each call gets the argument names of all others, with null: a chat
#   template renders {"city": "Rome", "day": null}, and that is what a model learns to write. From a file the arguments
#   have the type Json, and stay as they are.
# Source: datasets 5.2.0, arrow_dataset.py:Dataset.from_dict (pyarrow infers a struct) and
#   packaged_modules/json/json.py:Json._generate_tables.
# Remedy: features with datasets.Json() for the arguments, or arguments as a string of JSON (the form of OpenAI's API).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q datasets==5.2.0
cat > "$work/show.py" <<'PY'
import json

import datasets

datasets.disable_progress_bars()


def conversation(tool, **arguments):
    return {"messages": [{"role": "assistant", "tool_calls": [{"name": tool, "arguments": arguments}]}]}


rows = [conversation("weather", city="Rome"), conversation("events", day=3)]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
read = {
    "memory": datasets.Dataset.from_list(rows),
    "file": datasets.load_dataset("json", data_files="rows.jsonl", split="train"),
}
for name, dataset in read.items():
    for row in dataset:
        print(name, row["messages"][0]["tool_calls"][0])
PY
cd "$work"
HF_HOME=$work/home venv/bin/python show.py | tee seen
diff "$work/seen" - <<'SEEN'
memory {'name': 'weather', 'arguments': {'city': 'Rome', 'day': None}}
memory {'name': 'events', 'arguments': {'city': None, 'day': 3}}
file {'name': 'weather', 'arguments': {'city': 'Rome'}}
file {'name': 'events', 'arguments': {'day': 3}}
SEEN
