#!/usr/bin/env bash
# Guess: the columns of a CSV file that hold answers are text.
# Fact: the reader is pandas with its defaults. The answers None, NA, N/A, null and nan are missing values, so a question
#   whose right answer is "None" has no answer; a column of numerals becomes numbers, "007" 7 and "1e3" 1000.0; one of
#   True and False becomes booleans. A chat template then renders None, 7 or 1000.0. What a column becomes depends on all
#   of its rows, so a subset may differ from the whole, and the same rows in JSON Lines stay as they are.
# Source: datasets 5.2.0, packaged_modules/csv/csv.py:Csv._generate_tables (pandas.read_csv, keep_default_na=True).
# Remedy: load_dataset("csv", ..., keep_default_na=False, features=Features({"answer": Value("string")})).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile datasets==5.2.0 pandas==3.1.1 pyarrow==25.0.1
cat > "$work/show.py" <<'PY'
import json

import datasets

datasets.disable_progress_bars()
text = {"keep_default_na": False, "features": datasets.Features({"answer": datasets.Value("string")})}
for answers in (["None", "NA", "Paris"], ["007", "42"], ["007", "1e3"], ["True", "False"], ["True", "Paris"]):
    with open("rows.csv", "w") as file:
        file.write("\n".join(["answer", *answers]))
    with open("rows.jsonl", "w") as file:
        file.write("\n".join(json.dumps({"answer": answer}) for answer in answers))
    read = {
        "csv": datasets.load_dataset("csv", data_files="rows.csv", split="train"),
        "csv as text": datasets.load_dataset("csv", data_files="rows.csv", split="train", **text),
        "json": datasets.load_dataset("json", data_files="rows.jsonl", split="train"),
    }
    print(answers, "csv", list(read["csv"]["answer"]))
    assert list(read["csv as text"]["answer"]) == list(read["json"]["answer"]) == answers
PY
cd "$work"
HF_HOME=$work/home venv/bin/python show.py | tee seen
diff seen - <<'SEEN'
['None', 'NA', 'Paris'] csv [None, None, 'Paris']
['007', '42'] csv [7, 42]
['007', '1e3'] csv [7.0, 1000.0]
['True', 'False'] csv [True, False]
['True', 'Paris'] csv ['True', 'Paris']
SEEN
