sbatch \
    --parsable \
    --job-name=gpt-7b/run-1 \
    --nodes=8,16,32 \
    --gres=gpu:4 \
    --segment=8 \
    --signal=B:USR1@180 \
    --output=/shared/runs/gpt-7b/run-1/logs/slurm-%j.out \
    slurm/train.sbatch \
    --cluster gb200-nvl72 \
    --runtime none \
    --ranks-per-node 4 \
    --run-id run-1 \
    --runs-dir /shared/runs \
    --data-dir /shared/data \
    --exit-file /shared/runs/gpt-7b/run-1/logs/exit \
    --bad-nodes /shared/runs/gpt-7b/run-1/logs/bad-nodes \
    --min-nodes 8 \
    gpt-7b \
    'train.elastic=[16,64]'
