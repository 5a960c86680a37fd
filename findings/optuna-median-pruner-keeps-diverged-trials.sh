#!/usr/bin/env bash
# Guess: MedianPruner stops a trial whose loss is far above the median of the others at this step.
# Fact: it compares the best loss that the trial has had so far. A run that starts well and diverges from 1 to 10,000 is
#   never stopped and uses its whole budget, while a steady one that is a little worse is stopped in its first step. All
#   pruners on percentiles do so. A loss of NaN is ignored in the same way, once there has been a number.
# Source: optuna 5.0.0, pruners/_percentile.py:_get_best_intermediate_result_over_steps (np.nanmin over all steps).
# Remedy: report a loss that cannot recover (a running mean), or end diverged runs in the objective with TrialPruned.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q optuna==5.0.0
cat > "$work/show.py" <<'PY'
import math

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=2))


def train(name, losses):
    trial = study.ask()
    for step, loss in enumerate(losses):
        trial.report(loss, step)
        if trial.should_prune():
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            print(name, "pruned at step", step)
            return
    study.tell(trial, losses[-1] if math.isfinite(losses[-1]) else 1e9)
    print(name, "ran to the end")


train("good", [5, 4, 3, 2])
train("good too", [5, 4, 3, 2])
train("diverged", [1, 100, 1000, 10000])
train("not a number", [1, math.nan, math.nan, math.nan])
train("a little worse", [5.1, 4.1, 3.1, 2.1])
PY
"$work/venv/bin/python" "$work/show.py" | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
good ran to the end
good too ran to the end
diverged ran to the end
not a number ran to the end
a little worse pruned at step 0
SEEN
