#!/usr/bin/env bash
# Guess: the mean of 1,000 ones is 1. numpy sums float16 in float32 for a mean, and in pairs for a sum.
# Fact: for bfloat16 (ml_dtypes, the type that JAX, safetensors and ONNX give to numpy) sum and mean add one element after
#   the other in bfloat16. 256 + 1 is 256, so every sum of ones ends there: the mean of 1,000 is 0.2559, that of 100,000
#   is 0.0026. Means of weights, gradients or losses that were read as bfloat16 are too small without a word. A matrix
#   product is right.
# Source: numpy 2.4.6, _core/_methods.py:_mean (only float16 gets a float32 accumulator); ml_dtypes 0.6.0,
#   _src/ufuncs.h (add as a loop without pairwise summation).
# Remedy: mean(dtype=np.float32), or astype(np.float32) first.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q numpy==2.4.6 ml_dtypes==0.6.0
cat > "$work/show.py" <<'PY'
import ml_dtypes
import numpy as np

for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
    ones = np.ones(1000, dtype)
    name = np.dtype(dtype).name
    print(name, "sum", float(ones.sum()), "mean", round(float(ones.mean()), 4), "product", float(ones @ ones))
print("bfloat16 mean in float32", float(ones.mean(dtype=np.float32)))
print("bfloat16 mean of 100,000", round(float(np.ones(100_000, ml_dtypes.bfloat16).mean()), 4))
PY
"$work/venv/bin/python" "$work/show.py" | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
float32 sum 1000.0 mean 1.0 product 1000.0
float16 sum 1000.0 mean 1.0 product 1000.0
bfloat16 sum 256.0 mean 0.2559 product 1000.0
bfloat16 mean in float32 1.0
bfloat16 mean of 100,000 0.0026
SEEN
