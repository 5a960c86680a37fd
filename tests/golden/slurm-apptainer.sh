sbatch \
    --parsable \
    --job-name=gpt-7b/run-1 \
    --nodes=2 \
    --account=research \
    --gres=gpu:8 \
    --signal=B:USR1@180 \
    --output=/shared/runs/gpt-7b/run-1/logs/slurm-%j.out \
    slurm/train.sbatch \
    --cluster gcp-a3 \
    --runtime apptainer \
    --image /images/llmrecipes.sif \
    --ranks-per-node 8 \
    --run-id run-1 \
    --runs-dir /shared/runs \
    --data-dir /shared/data \
    --exit-file /shared/runs/gpt-7b/run-1/logs/exit \
    --bad-nodes /shared/runs/gpt-7b/run-1/logs/bad-nodes \
    --mount /usr/local/fastrak:/usr/local/fastrak \
    --mount /dev/aperture_devices:/dev/aperture_devices \
    gpt-7b \
    train.train_iters=10
