"""The contenders of the throughput benchmarks, each training the same model on the same tokens.

`python -m benchmarks.contenders NAME RECIPE.json` is started by a benchmark and takes orders from it (`turns.py`). Each
trains in the way its own project trains: precision, compilation and optimizer are those of its pretraining loop.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.turns import Session
from lab.gpu_report.rivals import count, gpu_memory, hf_trainer, micro_batches, plain
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.features import FEATURES


def ours(recipe: Recipe, session: Session) -> None:
    """This project: the calls of `llmrecipes.train.worker`, without data files, checkpoints and tracking."""
    from llmrecipes.engine.backends import backend
    from llmrecipes.engine.base import Batch

    engines = backend(recipe)
    platform = engines.platform()

    def batches() -> Iterator[Batch]:
        micro, length = recipe.layout.micro_batch_size, recipe.model.seq_length
        rest = {
            "loss_mask": torch.ones(micro, length),
            "position_ids": torch.arange(length).expand(micro, -1).contiguous(),
        }
        for inputs, labels in micro_batches(recipe):
            yield {"tokens": inputs, "labels": labels, **rest}

    with engines.join(recipe, platform) as world:
        plan = derive(recipe, world.size, detect())
        engine = engines.build(plan, platform)
        source = batches()
        gc.collect()
        gc.freeze()
        (module,) = engine.modules
        going = session.begin(parameters=count(module), layers=engine.implementation.name)
        while going:
            going = session.stepped(engine.train_step(source).loss, **gpu_memory())


def ours_default_allocator(recipe: Recipe, session: Session) -> None:
    """This project without its settings of glibc's allocator."""
    from llmrecipes.engine.core.platform import cpu

    cpu._keep_freed_memory = lambda: None
    ours(recipe, session)


def ours_fused(recipe: Recipe, session: Session) -> None:
    """This project with the functions that are compiled by default on a GPU only."""
    names = {"bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion"}
    wanted = {name: True for name in sorted(names) if FEATURES[name].recipe(recipe) is None}
    ours(recipe.model_copy(update={"layout": recipe.layout.model_copy(update=wanted)}), session)


def litgpt(recipe: Recipe, session: Session) -> None:
    """litgpt's GPT in the calls of `litgpt/pretrain.py`: compiled, Fabric's mixed precision, AdamW unfused on a CPU.

    Of GPT-like recipes only. Its positions are rotary (a quarter of the channels, its default), not learned: 98,304
    parameters fewer.
    """
    import lightning  # type: ignore[import-not-found]
    from litgpt.model import GPT, Config  # type: ignore[import-not-found]
    from litgpt.pretrain import initialize_weights  # type: ignore[import-not-found]
    from litgpt.utils import chunked_cross_entropy  # type: ignore[import-not-found]

    shape, options = recipe.model, recipe.optimizer
    if shape.position_embedding_type != "learned_absolute" or shape.gated_linear_unit:
        raise ValueError(f"recipe {recipe.name} is not a GPT")
    config = Config(
        block_size=shape.seq_length,
        n_layer=shape.num_layers,
        n_embd=shape.hidden_size,
        n_head=shape.num_attention_heads,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.vocab_size,
        intermediate_size=shape.ffn_hidden_size or 4 * shape.hidden_size,
        parallel_residual=False,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = "bf16-mixed" if recipe.train.precision == "bf16" else "32-true"
    fabric = lightning.Fabric(devices=1, accelerator=device, precision=precision)
    fabric.launch()
    fabric.seed_everything(recipe.train.seed)
    with fabric.init_module(empty_init=True):
        model = GPT(config)
    initialize_weights(fabric, model, n_layer=config.n_layer, n_embd=config.n_embd)
    model.transformer.wte.weight = model.lm_head.weight
    parameters = count(model)
    compiled = fabric.setup(torch.compile(model))
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(
            compiled.parameters(),
            lr=options.lr,
            betas=(options.adam_beta1, options.adam_beta2),
            weight_decay=options.weight_decay,
            fused=device == "cuda",
        )
    )
    source = micro_batches(recipe)

    parts = recipe.train.global_batch_size // recipe.layout.micro_batch_size

    def step() -> float:
        total = torch.zeros((), device=device)
        for _ in range(parts):
            inputs, labels = (each.to(device, non_blocking=True) for each in next(source))
            loss = chunked_cross_entropy(compiled(inputs), labels) / parts
            fabric.backward(loss)
            total += loss.detach()
        fabric.clip_gradients(compiled, optimizer, max_norm=options.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    going = session.begin(parameters=parameters)
    while going:
        going = session.stepped(step(), **gpu_memory())


def hf_trainer_compiled(recipe: Recipe, session: Session) -> None:
    """`transformers.Trainer` with its `torch_compile` option."""
    hf_trainer(recipe, session, compiled=True)


def ours_compiled(recipe: Recipe, session: Session) -> None:
    """This project with `layout.torch_compile`."""
    ours(recipe.with_layout(torch_compile=True), session)


CONTENDERS: dict[str, Callable[[Recipe, Session], None]] = {
    "llmrecipes": ours,
    "llmrecipes+compile": ours_compiled,
    "llmrecipes+fused": ours_fused,
    "llmrecipes-allocator": ours_default_allocator,
    "hf-trainer": hf_trainer,
    "hf-trainer+compile": hf_trainer_compiled,
    "litgpt": litgpt,
    "plain": plain,
}


def main() -> None:
    name, path = sys.argv[1:]
    session = Session()
    CONTENDERS[name](Recipe.model_validate_json(Path(path).read_text("utf-8")), session)


if __name__ == "__main__":
    main()
