#!/usr/bin/env bash
# Guess: a study that is resumed from its storage with the same seeded sampler goes on where it stopped.
# Fact: the generator is not in the storage. Every process with the seed begins it again: three trials after a restart are
#   the first three once more, and workers that share a seed do each other's trials. A search that a scheduler
#   interrupts often never leaves its first points. TPESampler does so until it has its startup trials.
# Source: optuna 5.0.0, samplers/_lazy_random_state.py:LazyRandomState and samplers/_random.py:RandomSampler.
# Remedy: no seed for a resumed study, a seed made from the number of trials so far, or QMCSampler, whose position is in
#   the storage.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q optuna==5.0.0
cat > "$work/show.py" <<'PY'
import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)


def start(sampler):
    study = optuna.create_study(
        study_name=type(sampler).__name__, storage="sqlite:///study.db", sampler=sampler, load_if_exists=True
    )
    study.optimize(lambda trial: trial.suggest_float("lr", 0, 1), n_trials=3)
    return study


for sampler in (optuna.samplers.RandomSampler, optuna.samplers.TPESampler):
    for _ in range(2):
        study = start(sampler(seed=1))
    print(sampler.__name__, [round(trial.params["lr"], 4) for trial in study.trials])
PY
cd "$work"
venv/bin/python show.py | tee seen
diff "$work/seen" - <<'SEEN'
RandomSampler [0.417, 0.7203, 0.0001, 0.417, 0.7203, 0.0001]
TPESampler [0.417, 0.7203, 0.0001, 0.417, 0.7203, 0.0001]
SEEN
