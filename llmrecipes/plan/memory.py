"""Memory of one rank, part by part.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198), counted tensor by tensor so that grouped queries, gated
MLPs, other precisions and other head sizes are covered; the attention matrix (their s² term) is absent because the
attention kernels in use do not keep it. For the classic GPT layer in 16 bits with dropout the count is their
34 s b h and the kernel's log-sum-exp. On a CPU a test compares it with what autograd really keeps.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from llmrecipes.plan.parameters import Parameters
from llmrecipes.plan.shape import Shape, shape
from llmrecipes.recipe.schema import Recipe

GIB = 1 << 30

# Resident after importing everything a CPU run imports: 0.5 GiB with megatron-core 0.16, 0.84 GiB with 0.19. A loader
# process is forked and shares most of it.
_CPU_PROCESS = int(0.9 * GIB)
_CPU_LOADER = int(0.1 * GIB)
# CUDA context, cuBLAS workspaces and communication buffers.
_CUDA_PROCESS = int(1.5 * GIB)
# What the allocator holds beyond the tensors that come and go in every step, as a share of them. On a GPU unused rests
# of blocks; on a CPU measured as resident memory of gpt-tiny at several batch sizes (1.85 to 1.9 times what its tensors
# take in fp32, 2.4 times in bf16).
_CUDA_REST = 0.05
_CPU_REST = {"fp32": 0.9, "bf16": 1.4, "fp16": 1.4}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step.

    `logits` are what the loss makes of the output layer's product; `checkpoint_copy` is the snapshot that a
    background save writes from (on a CPU run it shares the ranks' memory); `workspace` is the process without a model.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    checkpoint_copy: int
    workspace: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def as_dict(self) -> dict[str, int]:
        """Parts and their sum, in bytes."""
        return {**asdict(self), "total": self.total}


def estimate(recipe: Recipe, parameters: Parameters, data_parallel_size: int, device: str) -> Memory:
    """Estimate one rank's memory; `device` is `cuda` or `cpu`."""
    half = recipe.train.precision != "fp32"
    element = 2 if half else 4
    n = parameters.total
    shards = data_parallel_size if recipe.parallelism.use_distributed_optimizer else 1
    weights = element * n
    # Adam's two moments in fp32, and fp32 master weights where the model's own are not.
    optimizer = (12 if half else 8) * n // shards
    activations = _activations(recipe, element, device)
    logits = _logits(recipe)
    if device == "cuda":
        copy, process, rest = 0, _CUDA_PROCESS, _CUDA_REST
    else:
        copy = weights + optimizer if recipe.checkpoint.async_save else 0
        process = _CPU_PROCESS + _CPU_LOADER * recipe.data.num_workers
        rest = _CPU_REST[recipe.train.precision]
    return Memory(
        weights=weights,
        gradients=(4 if recipe.parallelism.grad_reduce_in_fp32 or not half else element) * n,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        checkpoint_copy=copy,
        workspace=process + int(rest * (activations + logits)),
    )


def _activations(recipe: Recipe, element: int, device: str) -> int:
    train, s = recipe.train, shape(recipe.model)
    tokens = train.micro_batch_size * s.seq_length
    layer, core = _layer(recipe, s, element, device)
    edge = element * s.hidden_size  # what is kept between layers: one residual stream
    if train.recompute_granularity == "full" and train.recompute_num_layers:
        chunk = train.recompute_num_layers
        if train.recompute_method == "uniform":
            stack = math.ceil(s.num_layers / chunk) * edge + min(chunk, s.num_layers) * layer
        else:
            # The layers behind the block are gone by the time one inside it is computed again.
            stack = chunk * edge + max(s.num_layers - chunk, 1) * layer
    elif train.recompute_granularity == "selective":
        stack = s.num_layers * (layer - core) + core
    else:
        stack = s.num_layers * layer
    ends = _mask(recipe, s, element, device) + _norm(recipe, s, element, device) + edge  # embedding; final norm
    return tokens * (stack + ends)


def _layer(recipe: Recipe, s: Shape, element: int, device: str) -> tuple[int, int]:
    """Bytes a layer keeps for one token, and the share of it that recomputing core attention saves."""
    model = recipe.model
    h, ffn, query, key = s.hidden_size, s.ffn_hidden_size, s.query_size, s.key_size
    norm, mask = _norm(recipe, s, element, device), _mask(recipe, s, element, device)
    core = 4 * s.num_attention_heads  # the log-sum-exp of each head's row in fp32
    if model.attention_dropout and device == "cpu":
        # torch has no fused CPU kernel with dropout: probabilities, mask, product and scaled inputs are kept after all.
        core = 3 * element * s.num_attention_heads * s.seq_length + element * (query + key)
    rope = model.position_embedding_type == "rope"
    # Rotation and norm make new queries and keys, while the values keep the whole projection alive.
    copies = element * (query + key) * (rope + model.qk_layernorm)
    tables = 4 * element * s.kv_channels if rope else 0  # cosines and sines, for queries and for keys
    # Inputs of the norm and of the projection; queries, keys and values; input of the output projection.
    attention = norm + element * (h + query + 2 * key + query) + copies + tables + core + mask
    # Result of the first product and input of the second; a gate adds its other half, and unfused its two factors.
    wide = 2 if not model.gated_linear_unit else 3 if recipe.train.torch_compile else 5
    mlp = norm + element * (h + wide * ffn) + mask
    return attention + mlp, core


def _norm(recipe: Recipe, s: Shape, element: int, device: str) -> int:
    """Bytes a norm keeps for one token: its input; torch's unfused RMSNorm on a CPU an fp32 copy and the result."""
    composite = device == "cpu" and recipe.model.normalization == "RMSNorm"
    return (8 if composite else element) * s.hidden_size


def _mask(recipe: Recipe, s: Shape, element: int, device: str) -> int:
    """Bytes of one dropout mask for one token: a byte a channel on a GPU, a whole element on a CPU."""
    return (element if device == "cpu" else 1) * s.hidden_size if recipe.model.hidden_dropout else 0


def _logits(recipe: Recipe) -> int:
    """Three fp32 values a logit: the log-softmax and, in the backward pass, the gradients on both of its sides."""
    s = shape(recipe.model)
    return 12 * recipe.train.micro_batch_size * s.seq_length * s.vocab_size
