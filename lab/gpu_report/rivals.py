"""Other loops that train a recipe's model, beside this project: compiled plain PyTorch, Hugging Face's Trainer.

Each trains as its project does: precision, compilation and optimizer are those of its pretraining loop. A session has
`begin` and `stepped`, which say whether to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from lab.gpu_report.plain_gpt import PlainGPT
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe


class Session(Protocol):
    """What asks a loop for steps."""

    def begin(self, **facts: Any) -> bool:
        """The model is built; whether a step is wanted."""
        ...

    def stepped(self, loss: float, **facts: Any) -> bool:
        """A step has ended; whether another is wanted."""
        ...


BATCHES = 16
"""Global batches of data, read in turn."""


def tokens(recipe: Recipe) -> torch.Tensor:
    """The same token ids for everyone, [samples, seq_length + 1], int64, drawn independently by Zipf's law.

    There is something to learn in them (the frequencies), so that a falling loss shows that training works.
    """
    model, samples = recipe.model, BATCHES * recipe.train.global_batch_size
    generator = torch.Generator().manual_seed(recipe.train.seed)
    weights = 1.0 / torch.arange(1, model.vocab_size + 1)
    drawn = torch.multinomial(weights, samples * (model.seq_length + 1), replacement=True, generator=generator)
    return drawn.view(samples, model.seq_length + 1)


def micro_batches(recipe: Recipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels, [micro_batch_size, seq_length] each, without end."""
    parts = tokens(recipe).split(recipe.layout.micro_batch_size)
    while True:
        for part in parts:
            yield part[:, :-1].contiguous(), part[:, 1:].contiguous()


def plain(recipe: Recipe, session: Session) -> None:
    """A compiled loop in plain PyTorch: autocast over fp32 weights, fused AdamW, as nanoGPT trains."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(recipe.train.seed)
    plan = derive(recipe, 1, detect())
    model = PlainGPT(recipe.model, plan.shape.vocab_size).to(device)
    optimizer = _adamw(recipe, model)
    compiled = torch.compile(model, dynamic=False)
    source = micro_batches(recipe)
    parts = plan.num_microbatches

    def step() -> float:
        total = torch.zeros((), device=device)
        for _ in range(parts):
            inputs, labels = (t.to(device, non_blocking=True) for t in next(source))
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.train.precision == "bf16"):
                loss = compiled(inputs, labels) / parts
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    going = session.begin(parameters=count(model))
    while going:
        going = session.stepped(step(), **gpu_memory())


def _adamw(recipe: Recipe, model: torch.nn.Module) -> torch.optim.Optimizer:
    options = recipe.optimizer
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=options.lr,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
        fused=True,
    )


def hf_trainer(recipe: Recipe, session: Session, *, compiled: bool = False) -> None:
    """`transformers.Trainer` with GPT-2, or Llama where the recipe is one, and torch's attention; bf16 is its autocast.

    It shifts labels itself, so the last token of each sequence is read but not predicted.
    """
    from transformers import (
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
        set_seed,
    )

    class Orders(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not session.begin(parameters=count(model), optimizer=str(args.optim))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs and not session.stepped(float(logs["loss"]), **gpu_memory()):
                control.should_training_stop = True

    set_seed(recipe.train.seed)
    train, options = recipe.train, recipe.optimizer
    model: Any = transformers_model(recipe)
    on_gpu = torch.cuda.is_available()
    sequences = tokens(recipe)[:, :-1].contiguous()
    arguments = TrainingArguments(
        output_dir="/nonexistent",  # nothing is saved
        max_steps=10**6,
        per_device_train_batch_size=recipe.layout.micro_batch_size,
        gradient_accumulation_steps=train.global_batch_size // recipe.layout.micro_batch_size,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        max_grad_norm=options.clip_grad,
        bf16=train.precision == "bf16",
        use_cpu=not on_gpu,
        torch_compile=compiled,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in sequences],
        data_collator=default_data_collator,
        callbacks=[Orders()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def transformers_model(recipe: Recipe) -> torch.nn.Module:
    """transformers' model of a recipe's shape: GPT-2, or Llama for rotary positions and RMSNorm.

    Raises:
        ValueError: the recipe is neither.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    shape = recipe.model
    ffn = shape.ffn_hidden_size or 4 * shape.hidden_size
    if shape.position_embedding_type == "learned_absolute" and not shape.gated_linear_unit:
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=shape.vocab_size,
                n_positions=shape.seq_length,
                n_embd=shape.hidden_size,
                n_layer=shape.num_layers,
                n_head=shape.num_attention_heads,
                n_inner=ffn,
                activation_function="gelu",
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )
    if shape.normalization != "RMSNorm" or not shape.gated_linear_unit or shape.num_moe_experts:
        raise ValueError(f"recipe {recipe.name} is neither a GPT-2 nor a Llama")
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            max_position_embeddings=shape.seq_length,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_query_groups or shape.num_attention_heads,
            head_dim=shape.kv_channels or shape.hidden_size // shape.num_attention_heads,
            intermediate_size=ffn,
            tie_word_embeddings=shape.share_embeddings_and_output_weights,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def count(module: torch.nn.Module) -> int:
    """Parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def gpu_memory() -> dict[str, int]:
    return {"peak_memory": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {}


RIVALS: Mapping[str, Callable[[Recipe, Session], None]] = {"plain": plain, "hf-trainer": hf_trainer}
