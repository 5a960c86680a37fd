#!/usr/bin/env bash
# Guess: the gradient of an expert's weight is summed over the ranks that have this expert, and no others.
# Fact: with sequence parallelism, that of the bias of its second matrix is summed over the tensor-parallel ranks, although
#   with expert_tensor_parallel_size 1 (the only one with which biases of experts are allowed) these have other experts.
#   The bias is marked as those of dense layers are, which see only a part of the sequence. Every rank then updates the
#   biases of its experts by the sum of the gradients of all of them; weights, and biases of the first matrix, are right.
# Source: megatron-core 0.19.2, tensor_parallel/layers.py:RowParallelLinear.__init__ (`sequence_parallel` of the bias),
#   distributed/finalize_model_grads.py:_allreduce_non_tensor_model_parallel_grads. Not TransformerEngine's layers.
# Remedy: for expert in SequentialMLP.local_experts: expert.linear_fc2.bias.sequence_parallel = False.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 megatron-core==0.19.2 numpy==2.4.6
cat > "$work/show.py" <<'PY'
import os
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

rank = int(sys.argv[1])
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
dist.init_process_group("gloo", rank=rank, world_size=2)
parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
config = TransformerConfig(
    num_layers=1, hidden_size=4, num_attention_heads=2, ffn_hidden_size=4, num_moe_experts=2, moe_router_topk=1,
    moe_router_pre_softmax=True, add_bias_linear=True, tensor_model_parallel_size=2, sequence_parallel=True,
    expert_model_parallel_size=2, expert_tensor_parallel_size=1, use_cpu_initialization=True,
)
local = LocalSpecProvider()
parts = MLPSubmodules(linear_fc1=local.column_parallel_linear(), linear_fc2=local.row_parallel_linear())
experts = SequentialMLP(1, config, parts, ProcessGroupCollection.use_mpu_process_groups())
experts.ddp_config = type("Settings", (), {"use_megatron_fsdp": False})
# As if the gradients of rank 0's expert were 1, and those of rank 1's were 10.
for parameter in experts.parameters():
    parameter.main_grad = torch.full_like(parameter, 10.0**rank)
_allreduce_non_tensor_model_parallel_grads([experts], config)
for turn in range(2):
    dist.barrier()
    if turn == rank:
        for name, parameter in experts.named_parameters():
            print(f"expert {rank}: {name.removeprefix('local_experts.0.')} {parameter.main_grad.flatten()[0]:g}", flush=True)
dist.barrier()
PY
cd "$work"
port=$((20000 + RANDOM % 10000))
venv/bin/python show.py 1 $port 2> errors >> other &
venv/bin/python show.py 0 $port 2> errors0 > seen || { cat errors errors0; exit 1; }
wait
cat seen other | tee both
diff both - <<'SEEN'
expert 0: linear_fc1.weight 1
expert 0: linear_fc1.bias 1
expert 0: linear_fc2.weight 1
expert 0: linear_fc2.bias 11
expert 1: linear_fc1.weight 10
expert 1: linear_fc1.bias 10
expert 1: linear_fc2.weight 10
expert 1: linear_fc2.bias 11
SEEN
