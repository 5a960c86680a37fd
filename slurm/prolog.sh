#!/usr/bin/env bash
# Slurm Prolog for compute nodes: drains an unhealthy node, and the job goes back to the queue for other nodes.
#
#   slurm.conf:  Prolog=/path/to/slurm/prolog.sh
#                PrologFlags=Alloc
#                SchedulerParameters=nohold_on_prolog_fail      (otherwise the job is held until it is released by hand)
#
# It runs as root on every node of a job before the job starts, so it must be quick. Edit these two lines:
python=${LLMRECIPES_PYTHON:-/opt/llmrecipes/.venv/bin/python}
cluster=${LLMRECIPES_CLUSTER:-}

cd / || exit 0
report=$(timeout 60 "$python" -P -m llmrecipes.cli doctor --quiet ${cluster:+--cluster "$cluster"} \
    --nodes "$(hostname)" --runs-dir /tmp --data-dir /tmp 2>&1) && exit 0
status=$?
# 1 is a finding. Anything else means that the doctor itself failed, which must not drain nodes.
((status == 1)) || exit 0
logger -t llmrecipes-doctor -- "$report" 2>/dev/null || true
echo "$report" >&2
exit 1
