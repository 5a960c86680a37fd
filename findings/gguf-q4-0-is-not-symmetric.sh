#!/usr/bin/env bash
# Guess: Q4_0 has a scale and no offset, so the weights w and -w have the same error.
# Fact: its 16 values are -8 to 7 times the scale, and the scale is the weight of largest magnitude, sign included, over
#   -8. That weight is exact, and one of the same size with the other sign loses an eighth: (1, -1) becomes (1, -0.875)
#   and (-1, 1) becomes (-1, 0.875). The first one in the block wins. Q5_0 loses a sixteenth; Q8_0 is symmetric.
# Source: gguf 0.19.0, quants.py:Q4_0.quantize_blocks (d = max / -8), as in llama.cpp's quantize_row_q4_0_ref.
# Consequence: rounding the negated tensor, or scaling a pair of matrices by -1 each, gives another model.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q gguf==0.19.0 numpy==2.4.6
cat > "$work/show.py" <<'PY'
import numpy as np
from gguf import GGMLQuantizationType, quants

block = np.zeros(32, np.float32)
block[:2] = 1, -1
for kind in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q8_0):
    pairs = []
    for weights in (block, -block):
        restored = quants.dequantize(quants.quantize(weights, kind), kind)
        pairs.append([round(float(value), 4) for value in restored[:2]])
    print(kind.name, *pairs)
PY
"$work/venv/bin/python" "$work/show.py" | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
Q4_0 [1.0, -0.875] [-1.0, 0.875]
Q5_0 [1.0, -0.9375] [-1.0, 0.9375]
Q8_0 [0.9999, -0.9999] [-0.9999, 0.9999]
SEEN
