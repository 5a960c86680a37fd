#!/usr/bin/env bash
# Guess: a number that is too large for a narrow type ends at the largest one in all of them, or is inf in all of them.
# Fact: it is inf in float8_e5m2, NaN in float8_e4m3fn (from 465 on; 464 still rounds to 448), the largest number in
#   float4_e2m1fn, and wraps around in int4 (8 becomes -8, 100 becomes 4). Moreover NaN becomes a zero in float4_e2m1fn,
#   so a broken gradient disappears, and 0 becomes NaN in float8_e8m0fnu, the type of MX scales, so a block of zeros whose
#   scale is converted as it is becomes NaN.
# Source: ml_dtypes 0.6.0, include/float8.h (ConvertImpl, saturation by type) and _src/intn_numpy.h. Each is what the type
#   can express (OCP MX 1.0 leaves conversions to the implementation).
# Remedy: clip to finfo/iinfo before the conversion, and set the scale of zero blocks.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q ml_dtypes==0.6.0 numpy==2.4.6
cat > "$work/show.py" <<'PY'
import ml_dtypes
import numpy as np


def converted(name, *values):
    numbers = np.array(values, np.float32).astype(getattr(ml_dtypes, name)).astype(np.float32)
    print(name, ", ".join(f"{value:g} -> {number:g}" for value, number in zip(values, numbers)))


converted("float8_e5m2", 57344, 1e6)
converted("float8_e4m3fn", 448, 464, 465, 1e6)
converted("float4_e2m1fn", 6, 1e6, np.nan)
converted("int4", 7, 8, 100)
converted("float8_e8m0fnu", 1, 0)
PY
"$work/venv/bin/python" "$work/show.py" | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
float8_e5m2 57344 -> 57344, 1e+06 -> inf
float8_e4m3fn 448 -> 448, 464 -> 448, 465 -> nan, 1e+06 -> nan
float4_e2m1fn 6 -> 6, 1e+06 -> 6, nan -> -0
int4 7 -> 7, 8 -> -8, 100 -> 4
float8_e8m0fnu 1 -> 1, 0 -> nan
SEEN
