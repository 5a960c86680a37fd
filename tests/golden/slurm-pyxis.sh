sbatch \
    --parsable \
    --job-name=gpt-7b/run-1 \
    --nodes=4 \
    --partition=gpu \
    --time=8:00:00 \
    --gres=gpu:8 \
    --switches=1@00:10:00 \
    --signal=B:USR1@180 \
    --output=/shared/runs/gpt-7b/run-1/logs/slurm-%j.out \
    slurm/train.sbatch \
    --cluster h100-ib \
    --runtime pyxis \
    --image 'ghcr.io#llmrecipes/llmrecipes:1' \
    --ranks-per-node 8 \
    --run-id run-1 \
    --runs-dir /shared/runs \
    --data-dir /shared/data \
    --exit-file /shared/runs/gpt-7b/run-1/logs/exit \
    --bad-nodes /shared/runs/gpt-7b/run-1/logs/bad-nodes \
    gpt-7b \
    train.train_iters=10
