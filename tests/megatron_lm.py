"""Checkpoints as Megatron-LM's training saves them: by megatron-core's own `dist_checkpointing.save`, or by itself."""

from __future__ import annotations

import multiprocessing
import queue
import random
import signal
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.enums import AttnBackend

from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.schema import Recipe

ITERATION = 1000


def arguments(recipe: Recipe, **changes: Any) -> Namespace:
    """What Megatron-LM's arguments say of a recipe's model, after its `validate_args`; some of the 800."""
    model, sizes = recipe.model, shape(recipe.model)
    values: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": sizes.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": sizes.kv_channels,
        "group_query_attention": model.num_query_groups is not None,
        "num_query_groups": model.num_query_groups or 1,
        "max_position_embeddings": sizes.max_position_embeddings,
        "position_embedding_type": model.position_embedding_type,
        "rotary_base": int(model.rotary_base),
        "rotary_percent": model.rotary_percent,
        "rotary_interleaved": False,
        "use_rope_scaling": False,
        "normalization": model.normalization,
        "norm_epsilon": model.layernorm_epsilon,
        "apply_layernorm_1p": False,
        "swiglu": model.gated_linear_unit,
        "squared_relu": False,
        "openai_gelu": False,
        "bias_gelu_fusion": False,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "multi_latent_attention": model.multi_latent_attention,
        "num_experts": model.num_moe_experts,
        "moe_router_topk": model.moe_router_topk,
        "moe_ffn_hidden_size": sizes.moe_ffn_hidden_size,
        "moe_layer_freq": model.moe_layer_freq,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "mtp_num_layers": model.mtp_num_layers,
        "rope_type": "rope",
        "vocab_size": model.vocab_size,
        "padded_vocab_size": sizes.vocab_size,
        "window_size": model.window_size,
        "window_attn_skip_freq": model.window_attn_skip_freq,
        "bf16": recipe.train.precision == "bf16",
        "fp16": recipe.train.precision == "fp16",
        # What is no plain value.
        "params_dtype": torch.bfloat16,
        "attention_backend": AttnBackend.auto,
        "exit_signal": signal.SIGTERM,
        "save": Path("/checkpoints"),
        **changes,
    }
    return Namespace(**values)


@contextmanager
def helpers_allowed() -> Iterator[None]:
    """A block in which megatron-core may start the processes that write files, also in a rank of the tests.

    It collects their results in a process of its own, which would outlive such a rank.
    """
    process: Any = multiprocessing.current_process()
    daemon = process._config.pop("daemon", None)
    (name,) = {"_get_write_results_queue", "get_write_results_queue"} & vars(filesystem_async).keys()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem_async, name, queue.SimpleQueue)
        try:
            yield
        finally:
            if daemon is not None:
                process._config["daemon"] = daemon


def save(engine: MegatronEngine, folder: Path, args: Namespace | None, *, optimizer: bool = True) -> Path:
    """Save as `megatron/training/checkpointing.py` does; on all ranks.

    Returns:
        The folder of the iteration.
    """
    path = folder / f"iter_{ITERATION:07d}"
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": group,
    }
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": ITERATION}
    if args is not None:
        state["args"] = args
    state["model"] = engine.modules[0].sharded_state_dict(metadata=metadata)
    if optimizer:
        state["optimizer"] = engine.optimizer.sharded_state_dict(state["model"], metadata=metadata)
    state["opt_param_scheduler"] = engine.scheduler.state_dict()
    stages, tensor = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    state["rng_state"] = ShardedObject(
        "rng_state",
        [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
            }
        ],
        (stages, tensor),
        (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        ),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    state["num_floating_point_operations_so_far"] = 1.0
    content = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    with helpers_allowed():
        dist_checkpointing.save(state, str(path), ("torch_dist", 1), content_metadata=content)
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION), "utf-8")
    dist.barrier()
    return path


TRAINS = find_spec("megatron.training") is not None
"""Whether Megatron-LM's training is there: PyPI's megatron-core has it since 0.19."""


def save_by_training(engine: MegatronEngine, folder: Path) -> Path:
    """Save by Megatron-LM's own `save_checkpoint`, with all of its arguments; of a model like Llama, in one process."""
    from megatron.core import rerun_state_machine
    from megatron.training import checkpointing, global_vars
    from megatron.training.arguments import parse_args

    model, sizes = engine.recipe.model, shape(engine.recipe.model)
    command = (
        f"train --num-layers {model.num_layers} --hidden-size {model.hidden_size} --lr 1e-3 --train-iters 1 "
        f"--num-attention-heads {model.num_attention_heads} --ffn-hidden-size {model.ffn_hidden_size} --swiglu "
        f"--group-query-attention --num-query-groups {model.num_query_groups} --seq-length {model.seq_length} "
        f"--max-position-embeddings {model.seq_length} --position-embedding-type rope --normalization RMSNorm "
        "--disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 1 --use-distributed-optimizer "
        f"--dist-ckpt-optim-fully-reshardable --no-one-logger --save {folder}"
    )
    with pytest.MonkeyPatch.context() as patch, helpers_allowed():
        patch.setattr("sys.argv", command.split())
        args = parse_args()
        args.vocab_size, args.padded_vocab_size = model.vocab_size, sizes.vocab_size
        args.use_dist_ckpt, args.ckpt_fully_parallel_save = True, False
        patch.setattr(global_vars, "_GLOBAL_ARGS", args)
        rerun_state_machine.initialize_rerun_state_machine()
        try:
            checkpointing.save_checkpoint(ITERATION, [engine.modules[0]], engine.optimizer, engine.scheduler, 0)
        finally:
            rerun_state_machine.destroy_rerun_state_machine()
    return folder / f"iter_{ITERATION:07d}"
