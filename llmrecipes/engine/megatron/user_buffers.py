"""Buffers that TransformerEngine's layers communicate through (`layout.tp_comm_overlap`)."""

from __future__ import annotations

from llmrecipes.engine.core.model.config import DTYPES
from llmrecipes.errors import UserError
from llmrecipes.plan.derive import Plan


def create_user_buffers(plan: Plan) -> None:
    """Allocate them; all ranks call it.

    For micro-batches of one shape, as in Megatron-LM's `training/initialize.py`. TransformerEngine takes ranks of
    consecutive numbers for tensor-parallel ones, which they are here.

    Raises:
        UserError: the GPUs cannot.
    """
    from transformer_engine.pytorch.module import base  # only where its layers are

    recipe = plan.recipe
    tokens = recipe.model.seq_length * recipe.layout.micro_batch_size // plan.layout.context_parallel_size
    try:
        base.initialize_ub(
            shape=[tokens, recipe.model.hidden_size],
            tp_size=plan.layout.tensor_model_parallel_size,
            quantization_modes=[base.UserBufferQuantizationMode.NONE],
            dtype=DTYPES[recipe.train.precision],
            ub_cfgs={},
            # gloo would connect every rank with every other by TCP.
            bootstrap_backend="nccl",
        )
    except RuntimeError as error:
        raise UserError(
            " ".join(str(error).split()),
            where="layout.tp_comm_overlap",
            rule="its user buffers need NVLink with multicast between the tensor-parallel ranks, or UB_SKIPMC=1",
            fix="layout.tp_comm_overlap=null",
        ) from error


def destroy_user_buffers() -> None:
    """Free them; a later model can have others."""
    from transformer_engine.pytorch.module import base

    base.destroy_ub()
