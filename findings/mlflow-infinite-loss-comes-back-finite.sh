#!/usr/bin/env bash
# Guess: MLflow returns the values that were logged, and a run's latest metric is the one that was logged last.
# Fact: in a SQL store an infinite loss is stored as 1.797e308. It comes back as a number that isfinite() accepts and a
#   query "metrics.loss < 1e309" selects. The latest value is that of the highest step, then of the highest timestamp,
#   then the larger value: a run that was resumed from step 50 after it had reached 100 shows the loss from before the
#   restart until it passes step 100 again.
# Source: mlflow 3.17.2, store/tracking/sqlalchemy_store.py:sanitize_metric_value and _update_latest_metrics_if_necessary.
# Remedy: log a flag beside the loss; read the history, not the run's metrics.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q mlflow-skinny==3.17.2 sqlalchemy==2.0.44 alembic==1.17.2
cat > "$work/show.py" <<'PY'
import math

import mlflow

mlflow.set_tracking_uri("sqlite:///mlflow.db")
client = mlflow.MlflowClient()
run = client.create_run(client.create_experiment("e")).info.run_id
for step, loss in enumerate([1.0, math.inf, math.nan]):
    client.log_metric(run, "loss", loss, step=step)
for step, loss in ((100, 9.0), (50, 2.0), (60, 1.5)):
    client.log_metric(run, "resumed", loss, step=step)
for metric in client.get_metric_history(run, "loss"):
    print("step", metric.step, metric.value, "finite" if math.isfinite(metric.value) else "not finite")
print("latest", client.get_run(run).data.metrics["resumed"])
PY
cd "$work"
venv/bin/python show.py 2> log | tee seen
diff "$work/seen" - <<'SEEN'
step 0 1.0 finite
step 1 1.7976931348623157e+308 finite
step 2 nan not finite
latest 9.0
SEEN
