"""The model card: what a run's files say of it, and nothing else. It names no license, because no file does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from llmrecipes import __version__
from llmrecipes.recipe.schema import Recipe, Source

if TYPE_CHECKING:
    from llmrecipes.data.manifest import Manifest


@dataclass(frozen=True)
class Measured:
    """What was recorded up to the checkpoint.

    Attributes:
        step: of the checkpoint.
        tokens: consumed until then.
        loss: of the last step.
        valid_loss: of the last evaluation; None: there was none.
        bits_per_byte: of the same, on the held-out text.
    """

    step: int
    tokens: int
    loss: float | None = None
    valid_loss: float | None = None
    bits_per_byte: float | None = None


def card(
    recipe: Recipe, family: str, parameters: int, measured: Measured, data: Manifest | None, notes: Sequence[str]
) -> str:
    """README.md of an exported model.

    Args:
        recipe: of the run.
        family: `model_type`.
        parameters: of the model.
        measured: losses.
        data: manifest of the prepared data; None: unknown here.
        notes: what the reader of the model has to know.
    """
    text = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- llmrecipes\n- megatron-core\n---\n",
        f"# {recipe.name}\n",
        f"{recipe.description}\n" if recipe.description else "",
        f"A model of type `{family}` with {parameters:,} parameters, {_how(recipe)} with llmrecipes {__version__} on "
        "Megatron-core and exported for transformers.\n",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained(".")\ntokenizer = AutoTokenizer.from_pretrained(".")\n```\n',
        *(f"Note: {note}.\n" for note in notes),
        "## Model\n",
        _table(_model(recipe)),
        "## Training\n",
        _table(_training(recipe, measured)),
        "## Data\n",
        _sources(recipe, data),
        "## Losses\n",
        _losses(measured),
        "## Use\n",
        f"{_use(recipe)} It has the gaps and biases of its data. No license is stated here: whoever publishes this "
        "model adds one, in keeping with the licenses of its data, its tokenizer and the model that it began from, if "
        "any.\n",
    ]
    return "\n".join(part for part in text if part)


def _how(recipe: Recipe) -> str:
    kind = "fine-tuned on conversations" if recipe.data.chat is not None else "trained"
    if recipe.lora is not None:
        kind += " by LoRA, merged into its base,"
    begun = recipe.train.pretrained
    return kind if begun is None else f"{kind} from the weights of {_public(begun)}"


def _use(recipe: Recipe) -> str:
    if recipe.data.chat is not None:
        return "It answers in the form of the conversations that it was trained on; nothing else was asked of it."
    if recipe.train.pretrained is not None:
        return "What its first weights had learnt is not recorded here."
    return "A base model: it continues text, and was not trained to follow instructions or to refuse any."


def _model(recipe: Recipe) -> dict[str, str]:
    model = recipe.model
    found = {
        "layers": str(model.num_layers),
        "width": str(model.hidden_size),
        "attention heads": str(model.num_attention_heads),
        "context": f"{model.seq_length:,} tokens",
        "vocabulary": f"{model.vocab_size:,}",
    }
    if model.num_moe_experts:
        found["experts"] = f"{model.num_moe_experts}, of which {model.moe_router_topk} for a token"
    return found


def _training(recipe: Recipe, measured: Measured) -> dict[str, str]:
    train, optimizer = recipe.train, recipe.optimizer
    return {
        "steps": f"{measured.step:,} of {train.train_iters:,}",
        "tokens": f"{measured.tokens:,}",
        "batch": f"{train.global_batch_size:,} × {recipe.model.seq_length:,} tokens",
        "precision": train.precision,
        "optimizer": f"AdamW, peak learning rate {optimizer.lr:g}, betas {optimizer.adam_beta1:g} and "
        f"{optimizer.adam_beta2:g}, weight decay {optimizer.weight_decay:g}",
        "schedule": f"{recipe.scheduler.lr_decay_style}, {recipe.scheduler.lr_warmup_iters:,} steps of warm-up",
        "seed": str(train.seed),
    }


def _sources(recipe: Recipe, data: Manifest | None) -> str:
    total = sum(source.weight for source in recipe.data.sources)
    rows = [["source", "share of the training samples", "documents", "training tokens"], ["---"] * 4]
    for index, source in enumerate(recipe.data.sources):
        counts = ["not known here"] * 2
        if data is not None:
            record = data.sources[index]
            kept = sum(each.documents for each in record.splits.values())
            counts = [f"{kept:,}", f"{record.splits['train'].tokens:,}"]
        rows.append([_name(source), f"{source.weight / total:.0%}", *counts])
    kind = recipe.data.tokenizer
    named = "byte-level BPE, trained on this data" if kind.type == "bpe" else f"{_public(kind.path)}"
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\nTokenizer: {named}.\n"


def _name(source: Source) -> str:
    if source.type == "hub":
        return f"{source.path} (Hugging Face dataset)"
    if source.type == "stdlib":
        return "source code of Python's standard library"
    return f"{source.type} files {_public(source.path)}"


def _public(path: str | None) -> str:
    """The last part of a path: a card is published, and a machine's folders are nobody's business."""
    return "" if path is None else path if path.count("/") == 1 and not path.startswith("/") else PurePath(path).name


def _losses(measured: Measured) -> str:
    found = {}
    if measured.loss is not None:
        found["training loss, last step"] = f"{measured.loss:.4f}"
    if measured.valid_loss is not None:
        found["validation loss, nats per token"] = f"{measured.valid_loss:.4f}"
    if measured.bits_per_byte is not None:
        found["validation, bits per byte"] = f"{measured.bits_per_byte:.4f}"
    return _table(found) if found else "None were recorded.\n"


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]) + "\n"
