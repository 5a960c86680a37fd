mkdir -p /shared/runs/gpt-7b/run-1/logs
prepare=$(sbatch \
    --parsable \
    --exclusive \
    --job-name=gpt-7b/run-1-prepare \
    --partition=cpu \
    --mem=0 \
    --nodes=3 \
    --output=/shared/runs/gpt-7b/run-1/logs/prepare-%j.out \
    slurm/prepare.sbatch \
    --runtime none \
    --data-dir /shared/data \
    gpt-7b)
sbatch \
    --parsable \
    --dependency=afterok:${prepare%%;*} \
    --kill-on-invalid-dep=yes \
    --job-name=gpt-7b/run-1 \
    --nodes=4 \
    --gres=gpu:8 \
    --switches=1@00:10:00 \
    --signal=B:USR1@180 \
    --output=/shared/runs/gpt-7b/run-1/logs/slurm-%j.out \
    slurm/train.sbatch \
    --cluster h100-ib \
    --runtime none \
    --ranks-per-node 8 \
    --run-id run-1 \
    --runs-dir /shared/runs \
    --data-dir /shared/data \
    --exit-file /shared/runs/gpt-7b/run-1/logs/exit \
    --bad-nodes /shared/runs/gpt-7b/run-1/logs/bad-nodes \
    gpt-7b
