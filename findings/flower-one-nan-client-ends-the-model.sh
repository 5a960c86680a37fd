#!/usr/bin/env bash
# Guess: with accept_failures and a fraction of clients, FedAvg survives one bad client of many, and a client that trained
#   on no examples does not count.
# Fact: a failure is an exception only. A client that returns NaN (an overflow in its own fp16) makes the weight NaN for
#   everybody, and the next round starts from it; so does FedMedian, where one would guess a median of the others. A
#   client that reports 0 examples has the weight 0, but 0 times NaN is NaN. No strategy looks, and nothing is printed.
# Source: flwr 1.42.0, server/strategy/aggregate.py:aggregate_inplace and aggregate_median (np.median).
# Remedy: leave out results that are not finite in an own aggregate_fit, before calling that of the strategy.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q flwr==1.42.0 numpy==2.4.6
cat > "$work/show.py" <<'PY'
import logging

import numpy as np
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAvg, FedMedian

logging.disable(logging.CRITICAL)


def result(weight, examples):
    parameters = ndarrays_to_parameters([np.array([weight], np.float32)])
    return None, FitRes(Status(Code.OK, ""), parameters, examples, {})


others = [result(weight, 100) for weight in (1.0, 2.0, 3.0, 4.0)]
bad = {"without": [], "NaN": [result(np.nan, 100)], "NaN, 0 examples": [result(np.nan, 0)]}
for strategy in (FedAvg(), FedMedian()):
    for name, results in bad.items():
        parameters, _ = strategy.aggregate_fit(1, others + results, [])
        print(type(strategy).__name__, name, float(parameters_to_ndarrays(parameters)[0][0]))
PY
"$work/venv/bin/python" "$work/show.py" | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
FedAvg without 2.5
FedAvg NaN nan
FedAvg NaN, 0 examples nan
FedMedian without 2.5
FedMedian NaN nan
FedMedian NaN, 0 examples nan
SEEN
