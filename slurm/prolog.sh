#!/usr/bin/env bash
# Slurm Prolog for compute nodes: drains an unhealthy node, and the job goes back to the queue for other nodes.
#
#   slurm.conf:  Prolog=/path/to/slurm/prolog.sh
#                PrologFlags=Alloc
#                PrologEpilogTimeout=300                        (if it is set at all: longer than the two limits below)
#                SchedulerParameters=nohold_on_prolog_fail      (otherwise the job is held until it is released by hand)
#
# It runs as root on every node of a job before the job starts, so it must be quick. Edit these lines:
python=${LLMRECIPES_PYTHON:-/opt/llmrecipes/.venv/bin/python}
cluster=${LLMRECIPES_CLUSTER:-}
# GPUs that are checked one by one: those of this job, because on a shared node another job's are in use. `all` where Slurm
# does not manage GPUs (no Gres=gpu), and gives whole nodes to jobs.
gpus=${LLMRECIPES_GPUS-${SLURM_JOB_GPUS-}}
# Seconds for the doctor, longer than it waits for nvidia-smi (30, and 20 for NVLink); and for nvidia-smi alone.
doctor_limit=${LLMRECIPES_DOCTOR_LIMIT:-120}
gpu_limit=${LLMRECIPES_GPU_LIMIT:-60}

say() {
    logger -t llmrecipes-doctor -- "$1" 2>/dev/null || true
    echo "$1" >&2
}

# Whether the driver has no answer. Not by timeout(1), which waits for its child: in the kernel's hands nothing ends it.
driver_hangs() {
    type nvidia-smi >/dev/null 2>&1 || return 1
    nvidia-smi -q -x >/dev/null 2>&1 </dev/null &
    local smi=$! end=$((SECONDS + gpu_limit))
    while kill -0 "$smi" 2>/dev/null; do
        ((SECONDS < end)) || { kill -9 "$smi" 2>/dev/null; return 0; }
        sleep 0.2
    done
    return 1
}

cd / || exit 0
own=()
[[ $gpus == all ]] || own=(--gpus "$gpus")
report=$(timeout -k 5 "$doctor_limit" "$python" -P -m llmrecipes.cli doctor --quiet ${cluster:+--cluster "$cluster"} \
    "${own[@]}" --nodes "$(hostname)" --runs-dir /tmp --data-dir /tmp 2>&1) && exit 0
status=$?
case $status in
    1) # a finding
        say "$report"
        exit 1
        ;;
    124 | 137) # the doctor was not done in time: because of the GPUs, or because of a file system, which drains no node
        if driver_hangs; then
            say "nvidia-smi does not answer within $gpu_limit s: drain and reboot the node"
            exit 1
        fi
        say "the doctor was not done within $doctor_limit s, but nvidia-smi answers; the node is not drained"
        ;;
    *) say "the doctor could not check this node (exit code $status); the node is not drained: $report" ;;
esac
exit 0
