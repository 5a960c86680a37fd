#!/usr/bin/env bash
# Guess: a value that is no ordinary number stays a string: the id of a commit (12e4567), of a run (2024_11_28).
# Fact: Hydra's overrides and OmegaConf's YAML take digits, "e", digits for a float and allow underscores in numbers.
#   commit=12e4567 is inf, commit=1234e56 is 1.234e+59, run=2024_11_28 is 20241128, and no error follows: the value is
#   formatted into a name or a path. One abbreviated id (7 digits) in 54 has this form. PyYAML, which
#   reads the same YAML file, keeps the ids with an "e" as strings, and has the underscores too.
# Source: hydra-core 1.3.8, grammar/OverrideLexer.g4 (FLOAT, INT); omegaconf 2.3.1, _utils.py:get_yaml_loader (its own
#   pattern of floats); PyYAML 6.0.3, resolver.py.
# Remedy: quote for the shell and for Hydra, 'commit="12e4567"', or declare the field as str in a structured config.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q hydra-core==1.3.8 omegaconf==2.3.1 pyyaml==6.0.3
cat > "$work/show.py" <<'PY'
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

parser = OverridesParser.create()
for text in ("1234567", "12e4567", "1234e56", "2024_11_28", '"12e4567"'):
    overridden = parser.parse_override(f"commit={text}").value()
    loaded = OmegaConf.create(f"commit: {text}").commit
    plain = yaml.safe_load(f"commit: {text}")["commit"]
    print(f"{text}: Hydra {overridden!r}, OmegaConf {loaded!r}, PyYAML {plain!r}")
PY
"$work/venv/bin/python" "$work/show.py" | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
1234567: Hydra 1234567, OmegaConf 1234567, PyYAML 1234567
12e4567: Hydra inf, OmegaConf inf, PyYAML '12e4567'
1234e56: Hydra 1.234e+59, OmegaConf 1.234e+59, PyYAML '1234e56'
2024_11_28: Hydra 20241128, OmegaConf 20241128, PyYAML 20241128
"12e4567": Hydra '12e4567', OmegaConf '12e4567', PyYAML '12e4567'
SEEN
