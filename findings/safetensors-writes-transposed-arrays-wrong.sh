#!/usr/bin/env bash
# Guess: save_file stores the values of an array, or refuses the array, as safetensors.torch does with a tensor that is
#   not contiguous. A transposed weight (another framework's [in, out] made [out, in]) is a usual argument.
# Fact: safetensors.numpy stores the shape of the view and the bytes of its buffer. The file is valid, the shape is
#   right, the values are in the wrong places. Version 0.7.0 stored the right ones; 0.8.0 does not, without a word.
#   The docstring asks for contiguous arrays in both versions. Nothing checks it.
# Source: safetensors 0.8.0, numpy.py:_flatten (passes ctypes.data and nbytes); 0.7.0, numpy.py:_tobytes (copies).
# Remedy: np.ascontiguousarray on each array before it is saved.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/save.py" <<'PY'
import sys

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

weight = np.arange(6, dtype=np.float32).reshape(2, 3).T
path = sys.argv[1]
for name, array in (("view", weight), ("copy", np.ascontiguousarray(weight))):
    save_file({"weight": array}, path)
    print(safetensors.__version__, name, load_file(path)["weight"].astype(int).tolist())
PY
for version in 0.7.0 0.8.0; do
    "${PYTHON:-python3}" -m venv "$work/$version"
    "$work/$version/bin/pip" install -q "safetensors==$version" numpy==2.4.6
    "$work/$version/bin/python" "$work/save.py" "$work/model.safetensors" | tee -a "$work/seen"
done
diff "$work/seen" - <<'SEEN'
0.7.0 view [[0, 3], [1, 4], [2, 5]]
0.7.0 copy [[0, 3], [1, 4], [2, 5]]
0.8.0 view [[0, 1], [2, 3], [4, 5]]
0.8.0 copy [[0, 3], [1, 4], [2, 5]]
SEEN
