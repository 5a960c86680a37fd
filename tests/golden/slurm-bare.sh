sbatch \
    --parsable \
    --job-name=gpt-7b/run-1 \
    --nodes=32 \
    --gres=gpu:4 \
    --segment=16 \
    --signal=B:USR1@180 \
    --output=/shared/runs/gpt-7b/run-1/logs/slurm-%j.out \
    --nice=10 \
    slurm/train.sbatch \
    --cluster gb200-nvl72 \
    --runtime none \
    --python /opt/venv/bin/python \
    --ranks-per-node 4 \
    --run-id run-1 \
    --runs-dir /shared/runs \
    --data-dir /shared/data \
    --exit-file /shared/runs/gpt-7b/run-1/logs/exit \
    --bad-nodes /shared/runs/gpt-7b/run-1/logs/bad-nodes \
    --max-restarts 5 \
    gpt-7b \
    train.train_iters=10
