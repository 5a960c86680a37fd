"""The table of a family of models: names of recipes and of transformers, in both directions.

One tensor of megatron-core becomes tensors of transformers by moving rows and transposing, without arithmetic. So the
way back is exact too: an import determines the place of each row by splitting the numbers of the rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.derived.weight_names import weights
from llmrecipes.recipe.schema import Model
from llmrecipes.recipe.sections.section import Section


class Transform(Protocol):
    """A reversible change of form; also of tensors on the `meta` device, for shapes, and of numbers of rows."""

    def __hash__(self) -> int: ...

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        """Tensors of transformers made from one of megatron-core; views of it where possible."""


class _Same:
    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return [tensor]


class _Transposed:
    """GPT-2's Conv1D holds its matrices as [in, out]."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return [tensor.t()]  # of a vector: itself


class _Vocabulary:
    """Rows of the vocabulary; megatron-core's matrices have rows of padding, which no token uses, after them."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return [tensor[: model.vocab_size]]


class _GateUp:
    """A gated MLP's first projection: the rows of the gate, then those of what is gated."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return list(tensor.chunk(2))


class _QueryKeyValue:
    """One projection, which holds for each group of query heads their rows, then those of their key and value head."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        groups, queries, width = _heads(model)
        rows = tensor.reshape(groups, queries + 2, width, *tensor.shape[1:])
        parts = (rows[:, :queries], rows[:, queries : queries + 1], rows[:, queries + 1 :])
        return [part.reshape(-1, *tensor.shape[1:]) for part in parts]


class _StackedQueryKeyValue:
    """Phi-3's one projection of [all queries, all keys, all values]."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return [torch.cat(QKV.split(tensor, model))]


class _FusedQueryKeyValue:
    """GPT-2's, as Conv1D."""

    def split(self, tensor: torch.Tensor, model: Model) -> list[torch.Tensor]:
        return [STACKED_QKV.split(tensor, model)[0].t()]


def _heads(model: Model) -> tuple[int, int, int]:
    """Groups of query heads, query heads of a group, and channels of a head."""
    sizes = shape(model)
    return sizes.num_query_groups, sizes.num_attention_heads // sizes.num_query_groups, sizes.kv_channels


SAME: Transform = _Same()
TRANSPOSED: Transform = _Transposed()
VOCABULARY: Transform = _Vocabulary()
GATE_UP: Transform = _GateUp()
QKV: Transform = _QueryKeyValue()
STACKED_QKV: Transform = _StackedQueryKeyValue()
FUSED_QKV: Transform = _FusedQueryKeyValue()


ACTIVATIONS = {
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "quick_gelu": ("quick_gelu",),
    "silu": ("silu", "swish"),
    "squared_relu": ("relu2",),
}
"""Activations by their names in recipes; in transformers the first is written, and all are read."""

PREDICTIONS = "mtp.layers."
"""Beginning of the names of weights of multi-token prediction."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

Config = Mapping[str, Any]


class Unsupported(NamedTuple):
    """A key whose value has no counterpart on the other side."""

    key: str
    """Of the recipe, as `model.<key>`, or of config.json."""
    value: object
    rule: str
    fix: str = ""


@dataclass(frozen=True)
class Key:
    """A key of config.json that is a key of `model` in a recipe.

    Args:
        theirs: in config.json.
        ours: in the section `model`.
        names: their values of each of ours, of which the first is written; None: the same as ours.
    """

    theirs: str
    ours: str
    names: Mapping[str, Sequence[str]] | None = None


@dataclass(frozen=True)
class Fixed:
    """A key of config.json for which recipes have only one value.

    Args:
        theirs: in config.json.
        value: what is written.
        unread: whether transformers has no such key, and computes as with this value; it is in published files.
    """

    theirs: str
    value: Any
    unread: bool = False


class Special(Protocol):
    """Keys that are not one to one."""

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        """Keys of config.json."""

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        """Values of `model`, of a config.json that transformers has completed: what it knows is not repeated here."""

    @property
    def theirs(self) -> Sequence[str]:
        """Keys of config.json that `model_of` reads."""

    @property
    def ours(self) -> Collection[str]:
        """Keys of `model` that `config_of` writes, or refuses where config.json cannot say them."""


@dataclass(frozen=True)
class To:
    """Tensors of transformers that one of megatron-core becomes; `*` is the number of a layer, then of an expert.

    Args:
        stacked: each is of all experts of a layer, the first dimension, and its name has no number of an expert.
    """

    names: tuple[str, ...]
    transform: Transform = SAME
    stacked: bool = False


class Pair(NamedTuple):
    """A tensor of megatron-core and those of transformers that it becomes."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform
    expert: int | None = None
    """Its place in theirs, if these are of all experts of a layer."""


@dataclass(frozen=True)
class Family:
    """A kind of model of transformers.

    Every key of `model` has one account: it is in `needs`, translated by `keys` or `specials`, in `free`, or in
    `default_only`. One without an account is exported with its default only, like those of `default_only`.
    """

    name: str
    """`model_type` in config.json."""
    architecture: str
    prefix: str
    """Of the names of all weights but the output layer's; files without a head leave it out."""
    needs: Mapping[str, Any]
    """The only value of some keys of `model`."""
    keys: tuple[Key, ...]
    fixed: tuple[Fixed, ...]
    tensors: Mapping[str, To]
    free: frozenset[str]
    """Keys of `model` that change nothing in what the weights of such a model compute."""
    default_only: frozenset[str]
    """Keys of `model` that config.json cannot say: another value than the default is refused."""
    specials: tuple[Special, ...] = ()
    training_only: frozenset[str] = field(default=frozenset())
    """Keys of config.json without an effect on what a model computes."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors of each layer of multi-token prediction that equal one of `tensors`, by that one's name."""

    def config_of(self, model: Model) -> tuple[dict[str, Any], list[Unsupported]]:
        """config.json of a model, without special tokens and element type, and the keys that have no counterpart."""
        values = resolved(model)
        obstacles = [
            Unsupported(f"model.{key}", values[key], f"a model of type {self.name} must have {key}={value}")
            for key, value in self.needs.items()
            if values[key] != value
        ]
        # Special tokens are the tokenizer's; left out, they would be those that transformers assumes for the family.
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.name,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }
        for entry in self.keys:
            value = values[entry.ours]
            if entry.names is not None and value not in entry.names:
                rule = f"a model of type {self.name} must have one of {', '.join(map(str, entry.names))}"
                obstacles.append(Unsupported(f"model.{entry.ours}", value, rule))
                continue
            config[entry.theirs] = value if entry.names is None else entry.names[value][0]
        config |= {entry.theirs: entry.value for entry in self.fixed}
        for special in self.specials:
            more, problems = special.config_of(model)
            config |= more
            obstacles += problems
        # These often follow from other obstacles, so they are reported only without others.
        return config, obstacles or self._not_default(model)

    def accounts(self) -> dict[str, frozenset[str]]:
        """The accounts by name, each with its keys of `model`."""
        special = (key for entry in self.specials for key in entry.ours)
        return {
            "needed": frozenset(self.needs),
            "translated": frozenset({entry.ours for entry in self.keys} | set(special)),
            "free": self.free,
            "default only": self.default_only,
        }

    def _not_default(self, model: Model) -> list[Unsupported]:
        """Keys that are exported with their default only, and have another value."""
        accounts = self.accounts()
        exported = accounts["needed"] | accounts["translated"] | accounts["free"]
        rule = f"a model of type {self.name} must have the default, "
        lost = "fields of megatron-core that a recipe has no key for would be lost"
        return [
            Unsupported(f"model.{key}", value, lost if key == "extra" else f"{rule}{default}")
            for key, default in defaults(type(model)).items()
            if key not in exported and (value := getattr(model, key)) != default
        ]

    def model_of(self, config: Config) -> tuple[dict[str, Any], list[Unsupported]]:
        """The section `model` of a config.json, but for `seq_length`; and what of it has no counterpart.

        Args:
            config: as transformers completes it, so that no default of transformers is repeated here.

        Raises:
            LookupError: it lacks a key that transformers has.
        """
        model: dict[str, Any] = dict(self.needs)
        obstacles: list[Unsupported] = []
        for entry in self.keys:
            value = config[entry.theirs]
            if entry.names is not None:
                ours = [mine for mine, theirs in entry.names.items() if value in theirs]
                if not ours:
                    rule = f"one of {', '.join(name for names in entry.names.values() for name in names)}"
                    obstacles.append(Unsupported(entry.theirs, value, rule))
                    continue
                value = ours[0]
            model[entry.ours] = value
        for fixed in self.fixed:
            value = config.get(fixed.theirs, fixed.value) if fixed.unread else config[fixed.theirs]
            if value != fixed.value:
                obstacles.append(Unsupported(fixed.theirs, value, f"only {json.dumps(fixed.value)} is supported"))
        for special in self.specials:
            more, problems = special.model_of(config)
            model |= more
            obstacles += problems
        rule = "unsupported key: it may change what the model computes"
        return model, obstacles + [
            Unsupported(key, config[key], rule, f"--ignore-key {key}, if it changes nothing")
            for key in self.unknown(config)
        ]

    @property
    def translated(self) -> frozenset[str]:
        """Keys of config.json that the table reads."""
        special = {key for entry in self.specials for key in entry.theirs}
        return frozenset({key.theirs for key in self.keys} | {fixed.theirs for fixed in self.fixed} | special)

    @property
    def known(self) -> frozenset[str]:
        """Keys of config.json that the table has."""
        return NEUTRAL | self.training_only | self.translated

    def unknown(self, config: Config) -> list[str]:
        """Keys of config.json that the table does not have, and whose value is neither null nor false."""
        known = self.known
        return [key for key, value in config.items() if key not in known and value is not None and value is not False]

    def pairs(self, model: Model) -> list[Pair]:
        """Every tensor of a model without obstacles, in the order of the model."""
        return [self.pair(name, model.num_layers) for name in weights(model)]

    def pair(self, name: str, layers: int) -> Pair:
        """What one of megatron-core's tensors becomes.

        Args:
            name: as in `recipe.derived.weight_names.weights`.
            layers: of the model; those of multi-token prediction are numbered after them.

        Raises:
            KeyError: the family has no such tensor.
        """
        numbers = _NUMBER.findall(name)
        if name.startswith(PREDICTIONS):
            numbers[0] = str(layers + int(numbers[0]))
        to = self.tensors[_NUMBER.sub("*", name)]
        expert = int(numbers.pop()) if to.stacked else None
        return Pair(name, tuple(_fill(template, numbers) for template in to.names), to.transform, expert)

    def copied(self, model: Model) -> dict[str, str]:
        """Tensors of a file that are copies of another one, by the name of the copy."""
        layers = range(model.num_layers, model.num_layers + (model.mtp_num_layers or 0))
        tied = {OUTPUT: EMBEDDING} if model.share_embeddings_and_output_weights else {}
        return {
            _fill(copy, [str(layer)]): self.pair(tied.get(ours, ours), model.num_layers).theirs[0]
            for layer in layers
            for ours, copy in self.copies.items()
        }


NEUTRAL = frozenset(
    {
        "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "diversity_penalty", "do_sample",
        "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "id2label", "initializer_range",
        "is_decoder", "label2id", "length_penalty", "max_length", "min_length", "model_type", "no_repeat_ngram_size",
        "num_beam_groups", "num_beams", "num_return_sequences", "output_router_logits", "pad_token_id",
        "pretraining_tp", "problem_type", "repetition_penalty", "return_dict", "router_aux_loss_coef",
        "router_jitter_noise", "task_specific_params", "temperature", "top_k", "top_p", "torch_dtype",
        "transformers_version", "typical_p", "use_cache",
    }
)  # fmt: skip
"""Keys of any config.json that do not change what a model computes, or say what other files say too."""


def defaults(section: type[Section]) -> dict[str, Any]:
    """Default of every key of a section; that of a required key equals no value."""
    return {key: field.get_default(call_default_factory=True) for key, field in section.model_fields.items()}


def resolved(model: Model) -> dict[str, Any]:
    """Values of the section `model`, with those that are derived where they are unset."""
    sizes = shape(model)
    derived = {
        "ffn_hidden_size": sizes.ffn_hidden_size,
        "num_query_groups": sizes.num_query_groups,
        "kv_channels": model.kv_channels or model.hidden_size // model.num_attention_heads,
        "max_position_embeddings": sizes.max_position_embeddings,
    }
    experts = {"moe_ffn_hidden_size": sizes.moe_ffn_hidden_size} if model.num_moe_experts else {}
    return {**model.model_dump(mode="json"), **derived, **experts}


def _fill(template: str, numbers: Sequence[str]) -> str:
    parts = template.split("*")
    return parts[0] + "".join(number + part for number, part in zip(numbers, parts[1:], strict=True))
