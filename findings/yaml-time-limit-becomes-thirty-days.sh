#!/usr/bin/env bash
# Guess: "time: 12:00:00" in the YAML of a cluster is Slurm's time limit of twelve hours, as "time: 08:00:00" is one of
#   eight.
# Fact: YAML 1.1 has numbers in base 60. PyYAML reads 12:00:00 as the integer 43200; with a leading zero it stays a
#   string. sbatch takes a number without a colon for minutes (man sbatch, --time): the job asks for 30 days. It is
#   refused or waits behind every shorter job, depending on the partition, or takes 30 days where that is allowed.
#   submitit has the number written to the script, since both are valid values.
# Source: PyYAML 6.0.3, resolver.py (the pattern of tag:yaml.org,2002:int, "[1-9][0-9_]*(?::[0-5]?[0-9])+") and
#   constructor.py:SafeConstructor.construct_yaml_int; submitit 1.5.4, slurm/slurm.py:_make_sbatch_string.
# Remedy: quote the limit.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q pyyaml==6.0.3 submitit==1.5.4
cat > "$work/submit.py" <<'PY'
import re

import yaml
from submitit.slurm.slurm import _make_sbatch_string

for text in ("08:00:00", "12:00:00", "'12:00:00'", "1-12:00:00"):
    limit = yaml.safe_load(f"time: {text}")["time"]
    script = _make_sbatch_string("train", "logs", time=limit)
    print(text, type(limit).__name__, re.search("--time=.*", script)[0])
PY
"$work/venv/bin/python" "$work/submit.py" | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
08:00:00 str --time=08:00:00
12:00:00 int --time=43200
'12:00:00' str --time=12:00:00
1-12:00:00 str --time=1-12:00:00
SEEN
