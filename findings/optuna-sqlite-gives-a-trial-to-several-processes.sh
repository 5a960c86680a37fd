#!/usr/bin/env bash
# Guess: an enqueued trial is run by one worker: ask() takes it from the queue of the storage.
# Fact: with SQLite the check that it still waits and the change to "running" are not one transaction, and there is no
#   lock between them (other databases are asked for one, SELECT ... FOR UPDATE, which SQLite does not have). Workers that
#   ask at the same time get the same one: in a run of three processes, 14 of 41 trials. Each trains the same
#   point, the last one's result counts, and none of them sees an error.
# Source: optuna 5.0.0, storages/_rdb/storage.py:RDBStorage.set_trial_state_values (with_for_update).
# Remedy: JournalStorage with a file, or a database server. WAL and timeouts do not help.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile optuna==5.0.0
cat > "$work/show.py" <<'PY'
import collections
import multiprocessing

import optuna
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

STORAGES = {
    "SQLite": lambda: RDBStorage("sqlite:///study.db", engine_kwargs={"connect_args": {"timeout": 60}}),
    "journal": lambda: JournalStorage(JournalFileBackend("study.log")),
}
TRIALS = 60


def work(name, barrier, taken):
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.load_study(study_name="study", storage=STORAGES[name]())
    for _ in range(TRIALS // 3):
        barrier.wait()
        taken.put(study.ask().number)


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    spawn = multiprocessing.get_context("spawn")
    for name, storage in STORAGES.items():
        study = optuna.create_study(study_name="study", storage=storage())
        for number in range(TRIALS):
            study.enqueue_trial({"number": number})
        barrier, taken = spawn.Barrier(3), spawn.Queue()
        workers = [spawn.Process(target=work, args=(name, barrier, taken)) for _ in range(3)]
        for worker in workers:
            worker.start()
        count = collections.Counter(taken.get() for _ in range(TRIALS))
        for worker in workers:
            worker.join()
        print(name, "trials that several workers have:", "some" if max(count.values()) > 1 else "none")
PY
cd "$work"
venv/bin/python show.py | tee seen
diff seen - <<'SEEN'
SQLite trials that several workers have: some
journal trials that several workers have: none
SEEN
