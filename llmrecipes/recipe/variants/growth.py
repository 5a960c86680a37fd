"""What a model can grow to: more layers, and wider ones whose new parts are copies.

Depth: `stack` repeats the whole model (Gong et al. 2019; arXiv 2405.15319), `interpolate` every layer (arXiv
1710.10348), and `identity` puts copies behind the layers whose output projections are 0, so that they add nothing to
the residual stream (arXiv 2401.02415). Width: new channels are copies, and what reads them gets a part of the old
weights (Net2Net, arXiv 1511.05641; of transformers bert2BERT, arXiv 2110.07143). A width of the residual stream that is
a multiple of the old one has every channel as often as the others, so that no norm changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from llmrecipes.errors import UserError
from llmrecipes.options import Option, declared
from llmrecipes.recipe.derived.degrees import multiples
from llmrecipes.recipe.derived.shape import shape, unrotated
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.load import load
from llmrecipes.recipe.rules.extra_rules import inexact
from llmrecipes.recipe.schema import Model, Recipe
from llmrecipes.recipe.sections.model_section import TRAINING_ONLY
from llmrecipes.recipe.variants.proxy import suffixed
from llmrecipes.recipe.variants.upcycling import problems_error, unchanged_tokens

SUFFIX = "-grown"
METHODS = ("identity", "stack", "interpolate")
"""How layers are added; the first preserves what the model computes."""


@dataclass(frozen=True)
class Growth:
    """Sizes to grow to; None: as it is. Every field is an option of `grow`."""

    layers: Annotated[int | None, Option("Grow to N layers.", metavar="N", least=1)] = None
    by: Annotated[
        str | None, Option("Add layers as identity (default; the loss stays), stack or interpolate.", metavar="METHOD")
    ] = None
    hidden_size: Annotated[
        int | None, Option("Grow the residual stream to a multiple of its width.", metavar="N", least=1)
    ] = None
    ffn_hidden_size: Annotated[int | None, Option("Grow dense MLPs to this width.", metavar="N", least=1)] = None
    moe_ffn_hidden_size: Annotated[int | None, Option("Grow routed experts to this width.", metavar="N", least=1)] = (
        None
    )
    heads: Annotated[int | None, Option("Grow to a multiple of the attention heads.", metavar="N", least=1)] = None
    """Of queries; those of keys and values grow by the same factor."""
    experts: Annotated[
        int | None, Option("Grow to a multiple of the experts and of their top k.", metavar="N", least=1)
    ] = None

    @property
    def method(self) -> str:
        return self.by or METHODS[0]


OPTIONS = {name: f"--{field.word}" for name, field in declared(Growth).items()}


@dataclass(frozen=True)
class Layer:
    """A layer of the grown model.

    Attributes:
        source: number of the layer that it is a copy of.
        added: it is not that layer itself.
        silent: its output projections are 0.
    """

    source: int
    added: bool
    silent: bool


def layers(before: int, after: int, method: str) -> tuple[Layer, ...]:
    """The layers of a model of `after` layers, grown from one of `before`."""
    if method == "stack":
        sources = [number % before for number in range(after)]
    else:
        sources = [number * before // after for number in range(after)]
    seen: set[int] = set()
    planned = []
    for source in sources:
        added = source in seen
        planned.append(Layer(source, added, added and method == "identity"))
        seen.add(source)
    return tuple(planned)


def preserves(before: Model, after: Model, growth: Growth) -> bool:
    """Whether the grown model computes what the small one does."""
    return after.num_layers == before.num_layers or growth.method == "identity"


def load_grown(path: Path, growth: Growth, overrides: Sequence[str]) -> tuple[Recipe, Recipe]:
    """The recipe of a run, and that of the grown model after the overrides.

    Args:
        path: the run's resolved recipe.
        overrides: `key.path=value`; without a `name` the new recipe has the name of the old one with `-grown`.

    Raises:
        UserError: a size that the method cannot grow to, or an invalid recipe.
    """
    small = load(str(path)).recipe
    if refused := list(_refused(small, growth)):
        raise refused[0]
    keys = _keys(small, growth)
    written = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    loaded = load(str(path), [f"name={suffixed(small.name, SUFFIX)}", *written, *overrides])
    if problems := list(_unchanged(small, loaded.recipe, keys)):
        raise problems_error(problems, loaded, "this run cannot grow")
    return small, loaded.recipe


def _keys(small: Recipe, growth: Growth) -> dict[str, Any]:
    """Keys of the grown recipe; what an unset key would derive from a size that grows stays as it is."""
    model = small.model
    s = shape(small.model)
    keys: dict[str, Any] = {}
    if growth.layers:
        keys["model.num_layers"] = growth.layers
        if model.num_moe_experts:
            pattern = [s.moe_layers(layer.source, layer.source + 1) for layer in _layers(model, growth)]
            frequency = model.moe_layer_freq
            if not isinstance(frequency, int) or pattern != [int(n % frequency == 0) for n in range(growth.layers)]:
                keys["model.moe_layer_freq"] = pattern
        if model.no_rope_freq is not None:
            left_out = unrotated(model)
            keys["model.no_rope_freq"] = [int(left_out[layer.source]) for layer in _layers(model, growth)]
        if model.window_attn_skip_freq is not None:
            keys["model.window_attn_skip_freq"] = [int(s.windowed[layer.source]) for layer in _layers(model, growth)]
    if growth.hidden_size:
        keys["model.hidden_size"] = growth.hidden_size
    if growth.heads:
        keys["model.num_attention_heads"] = growth.heads
        if model.num_query_groups:
            keys["model.num_query_groups"] = model.num_query_groups * growth.heads // model.num_attention_heads
    if (growth.hidden_size or growth.heads) and not model.multi_latent_attention:
        keys["model.kv_channels"] = s.kv_channels
    if growth.ffn_hidden_size or growth.hidden_size:
        keys["model.ffn_hidden_size"] = growth.ffn_hidden_size or s.ffn_hidden_size
    if model.num_moe_experts and (growth.moe_ffn_hidden_size or growth.ffn_hidden_size or growth.hidden_size):
        keys["model.moe_ffn_hidden_size"] = growth.moe_ffn_hidden_size or s.moe_ffn_hidden_size
    if growth.experts:
        keys["model.num_moe_experts"] = growth.experts
        keys["model.moe_router_topk"] = model.moe_router_topk * growth.experts // s.num_moe_experts
    if keys and small.train.pretrained is not None:
        keys["train.pretrained"] = None  # the weights are those of the run
    return keys


def _layers(model: Model, growth: Growth) -> tuple[Layer, ...]:
    return layers(model.num_layers, growth.layers or model.num_layers, growth.method)


def _refused(small: Recipe, growth: Growth) -> Iterator[UserError]:
    """Sizes and models that cannot grow so."""
    model = small.model
    s = shape(small.model)
    now = {
        "layers": s.num_layers,
        "hidden_size": s.hidden_size,
        "ffn_hidden_size": s.ffn_hidden_size,
        "moe_ffn_hidden_size": s.moe_ffn_hidden_size,
        "heads": s.num_attention_heads,
        "experts": s.num_moe_experts,
    }
    asked = {field_.name: getattr(growth, field_.name) for field_ in fields(growth) if field_.name != "by"}
    asked = {name: size for name, size in asked.items() if size is not None}
    if growth.by is not None and growth.by not in METHODS:
        yield UserError(f"{growth.by!r}", where="--by", rule=f"one of {', '.join(METHODS)}")
    if growth.by is not None and growth.layers is None:
        yield UserError(
            "set without --layers", where="--by", rule="--by selects how layers are added", fix="--layers N"
        )
    if not asked or all(size == now[name] for name, size in asked.items()):
        option = OPTIONS[next(iter(asked), "layers")]
        yield UserError(
            "nothing grows",
            where=option,
            rule="at least one size must be larger than that of the run",
            fix=f"--layers {2 * s.num_layers}, for example",
        )
    if not model.num_moe_experts:
        for name in ("experts", "moe_ffn_hidden_size"):
            if name in asked:
                yield UserError(
                    "set for a dense model",
                    where=OPTIONS[name],
                    rule="only models with experts have this size",
                    fix="llmrecipes upcycle RUN turns a dense model into a mixture of experts",
                )
    if "ffn_hidden_size" in asked and s.moe_layers(0, s.num_layers) == s.num_layers:
        yield UserError(
            "set for a model without dense layers",
            where="--ffn-hidden-size",
            rule="--ffn-hidden-size is the width of dense MLPs",
            fix="--moe-ffn-hidden-size N",
        )
    for name, size in asked.items():
        if size < now[name]:
            yield UserError(
                f"{size} is less than the run's {now[name]}",
                where=OPTIONS[name],
                rule="sizes can only grow",
                fix=f"{OPTIONS[name]} {2 * now[name]}",
            )
    yield from _not_multiples(asked, now, growth)
    yield from _impossible(small, asked)


def _not_multiples(asked: dict[str, int], now: dict[str, int], growth: Growth) -> Iterator[UserError]:
    rules = {
        "hidden_size": "every channel of the residual stream must be copied equally often, or the norms change",
        "heads": "every head must be copied equally often",
        "experts": "every expert must be copied equally often",
    }
    if growth.method == "stack":
        rules["layers"] = "stacking repeats all layers"
    for name, rule in rules.items():
        if name in asked and now[name] and asked[name] % now[name]:
            yield UserError(
                f"{asked[name]} is not a multiple of {now[name]}",
                where=OPTIONS[name],
                rule=rule,
                fix=f"{OPTIONS[name]} {multiples(asked[name], now[name])}",
            )


def _impossible(small: Recipe, asked: dict[str, int]) -> Iterator[UserError]:
    model = small.model
    if small.lora is not None:
        yield UserError(
            "the run has adapters only",
            where="lora",
            rule="only a full model can be grown",
            fix="llmrecipes export RUN --to hf --merge-adapter, and import the result",
        )
    if model.mtp_num_layers:
        yield UserError(
            f"{model.mtp_num_layers}",
            where="model.mtp_num_layers",
            rule="multi-token prediction layers cannot be grown",
        )
    if model.use_mup and "hidden_size" in asked:
        yield UserError(
            "true with --hidden-size",
            where="model.use_mup",
            rule="the maximal-update parametrisation scales activations by the width",
            fix="remove --hidden-size",
        )
    if "experts" not in asked:
        return
    fix = "remove --experts"
    if model.moe_router_num_groups:
        yield UserError(
            f"{model.moe_router_num_groups} with --experts",
            where="model.moe_router_num_groups",
            rule="group scores would count the copies of an expert",
            fix=fix,
        )
    if model.moe_expert_capacity_factor is not None:
        yield UserError(
            f"{model.moe_expert_capacity_factor:g} with --experts",
            where="model.moe_expert_capacity_factor",
            rule="a full expert drops tokens, which then lose part of their output",
            fix=fix,
        )
    if model.moe_router_score_function == "sigmoid" and model.moe_router_topk == 1:
        yield UserError(
            "1 with sigmoid scores and --experts",
            where="model.moe_router_topk",
            rule="the score of a single expert is not normalised, but those of its copies would be",
            fix=fix,
        )


def _unchanged(small: Recipe, grown: Recipe, keys: dict[str, Any]) -> Iterator[Problem]:
    """Growth changes sizes, not the rest of the model nor the meaning of token ids."""
    yield from inexact(grown.model, "grow")
    free = TRAINING_ONLY - {"seq_length", "make_vocab_size_divisible_by", "moe_expert_capacity_factor"}
    if small.model.position_embedding_type != "learned_absolute" or small.model.max_position_embeddings:
        free |= {"seq_length"}
    for name in Model.model_fields:
        before = keys.get(f"model.{name}", getattr(small.model, name))
        after = getattr(grown.model, name)
        if before != after and name not in free:
            yield Problem(
                f"model.{name}",
                f"{after}, but {before} in the grown model",
                "only the sizes given as options may change",
                "remove it",
            )
    if grown.name == small.name:
        yield Problem(
            "name", f"{grown.name!r} is the run's name", "the new model needs a different name", "remove name"
        )
    yield from unchanged_tokens(small, grown, "grow a run that uses a Hugging Face tokenizer")
