"""`model.extra`: fields of megatron-core's `TransformerConfig` that have no key."""

from __future__ import annotations

from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from llmrecipes.checkpoint.compatibility import compatibility
from llmrecipes.cli.app import run
from llmrecipes.engine.core.model.config import accepted_by_core, transformer_config
from llmrecipes.engine.requirements import require_fields
from llmrecipes.hf.family import family_of
from llmrecipes.models.convert import converted_recipe
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import recipe_hash, to_yaml
from llmrecipes.recipe.reading.core_fields import converted, fields_of_model, type_of
from llmrecipes.recipe.reading.keys import hint
from llmrecipes.recipe.rules.extra_rules import LACKED_BY_LOCAL_LAYERS, UNSUPPORTED, _extra
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.variants.growth import Growth, load_grown
from llmrecipes.recipe.variants.pruned_models import PruneOptions, load_pruned
from llmrecipes.recipe.variants.upcycling import load_upcycled
from tests.helpers import LLAMA, ROOMY, built, tiny
from tests.refusals import refused, require_message
from tests.unit.test_model_hybrid import gpt_of

EXPERTS = {"num_moe_experts": 4, "add_bias_linear": False}


def with_extra(**extra: Any) -> Recipe:
    return tiny(model={"extra": extra})


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "name", "value", "tokens"),
    [
        ({}, "softmax_scal", 0.5, ("unknown key", "TransformerConfig", "softmax_scale")),
        ({}, "xyzzy", 0.5, ("unknown key", "transformer_config.py")),
        ({}, "_cpu_offloading_context", None, ("unknown key",)),
        ({}, "mla_down_proj_fusion", True, ("unknown key", "TransformerConfig")),
        ({}, "num_layers", 3, ("determined by the recipe", "model.num_layers")),
        ({}, "tensor_model_parallel_size", 2, ("layout.tensor_model_parallel_size",)),
        ({}, "recompute_modules", ["mlp"], ("layout.recompute_modules",)),
        ({}, "tp_comm_overlap", True, ("layout.tp_comm_overlap",)),
        ({}, "params_dtype", "fp32", ("train.precision",)),
        ({}, "activation_func", "gelu", ("model.activation_func",)),
        ({}, "init_method", "normal", ("model.init_method",)),
        ({}, "timers", 1, ("Optional[Callable]", "JSON")),
        ({}, "mamba_training_ssm_states_dtype", "bf16", ("not supported",)),
        ({}, "quant_recipe", {}, ("RecipeConfig", "JSON")),
        ({}, "fp4_quantizer_factory", "os.system", ("not supported", "code")),
        ({}, "config_logger_dir", "/tmp", ("not supported", "files")),
        ({}, "flash_decode", True, ("not supported", "inference")),
        ({}, "softmax_scale", "0.5", ("'0.5'", "Optional[float]")),
        ({}, "softmax_scale", True, ("True", "Optional[float]")),
        ({}, "rotary_interleaved", 1, ("1", "bool")),
        ({}, "min_offloaded_tensor_size", 1.0, ("1.0", "int")),
        ({}, "min_offloaded_tensor_size", 1 << 63, ("9223372036854775808", "int")),
        ({}, "offload_modules", ["x" * 2000], ("list[str]",)),
        ({}, "activation_offload_fraction", None, ("None", "float")),
        ({}, "moe_shared_expert_gate", True, ("model.num_moe_experts",)),
        ({}, "mtp_detach_heads", True, ("model.mtp_num_layers",)),
        ({}, "fp8_margin", 1, ("train.fp8",)),
        (EXPERTS, "moe_router_topk", 1, ("model.moe_router_topk",)),
    ],
)  # fmt: skip
def test_a_wrong_field_is_one_problem(model: dict[str, Any], name: str, value: Any, tokens: tuple[str, ...]) -> None:
    (problem,) = check(tiny(model={**model, "extra": {name: value}}))
    assert problem.key == f"model.extra.{name}"
    text = f"{problem.what}\n{problem.rule}\n{problem.fix}"
    assert not [token for token in tokens if token not in text], text
    assert len(text) < 600


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        ({}, "softmax_scale", 1), ({}, "softmax_scale", None),
        ({}, "flash_attention_version", 3),
        (EXPERTS, "moe_router_force_biased", 0.5), ({**LLAMA, "mtp_num_layers": 1}, "mtp_detach_heads", True),
    ],
)  # fmt: skip
def test_a_value_of_the_declared_type_is_taken(model: dict[str, Any], name: str, value: Any) -> None:
    assert check(tiny(model={**model, "extra": {name: value}})) == []


def test_latent_attention_has_more_fields() -> None:
    latent = {"multi_latent_attention": True, "position_embedding_type": "rope", "normalization": "RMSNorm"}
    model = {
        **latent,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
    }
    assert check(tiny(model={**model, "extra": {"mla_down_proj_fusion": True}})) == []


def test_the_types_are_those_of_the_dataclasses() -> None:
    """Every field has an answer: determined, unsupported, or of a type that JSON has, and its default is of it."""
    hints = get_type_hints(MLATransformerConfig)
    declared, extra = fields_of_model(latent=True), _extra()
    assert set(declared) == set(hints)
    assert set(fields_of_model(latent=False)) == {field.name for field in fields(TransformerConfig)}
    assert set(extra.determined) | set(extra.unsupported) | set(LACKED_BY_LOCAL_LAYERS) <= set(declared)
    assert not set(extra.determined) & set(UNSUPPORTED)
    for field in fields(MLATransformerConfig):
        takes = type_of(declared[field.name])
        if field.name not in extra.determined and field.name not in extra.unsupported:
            json_has = not any(
                word in str(hints[field.name]) for word in ("Callable", "torch", "Manager", "RecipeConfig")
            )
            assert (takes is not None) is json_has, field.name
            if json_has and isinstance(field.default, bool | int | float | str | None):
                assert converted(field.default, declared[field.name]) == field.default


def test_what_the_engine_sets_is_not_a_field_for_all() -> None:
    """A field that this program sets to another value than megatron-core's default is refused."""
    default = {field.name: field.default for field in fields(TransformerConfig)}
    plan = derive(tiny(layout={"pipeline_model_parallel_size": 2}), 2, ROOMY)
    extra = _extra()
    for on_gpu, layers in ((False, False), (True, False)):
        made = transformer_config(plan, on_gpu=on_gpu, transformer_engine=layers)
        ours = {name for name, value in default.items() if getattr(made, name) != value}
        # Those that remain are set by `__post_init__`, or have the default factory of a list.
        ours -= extra.determined.keys() | extra.unsupported.keys()
        assert ours <= {"offload_modules", "microbatch_group_size_per_vp_stage"}


def test_an_unknown_key_of_the_model_is_sent_there() -> None:
    assert "set model.extra.softmax_scale" in str(hint("model.softmax_scale"))
    assert "model.extra" not in str(hint("optimizer.use_megatron_fsdp"))


# -- what megatron-core and the layers refuse ------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("extra", "token"),
    [
        # By `__post_init__`, in a ValueError and an AssertionError; by the layers.
        ({"overlap_p2p_comm_warmup_flush": True}, "batch_p2p_comm"),
        ({"batch_invariant_mode": True}, "FlashAttention"),
        ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma"),
    ],
)
def test_a_combination_is_refused_before_the_ranks_start(extra: dict[str, Any], token: str) -> None:
    with refused("model.extra", rule=(token, *extra)):
        require_fields(derive(with_extra(**extra), 1, ROOMY))
    with refused("model.extra", rule=(token, *extra)):
        built(with_extra(**extra))


def test_ranks_are_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("llmrecipes.workflow.train.run_ranks", None)
    change = "model.extra.batch_invariant_mode=true"
    runs = tmp_path / "runs"
    assert run(["train", "gpt-tiny", change, "--nproc", "2", "--runs-dir", str(runs)]) == 2
    require_message(capsys.readouterr().err, "model.extra", rule=("AssertionError", "batch_invariant_mode"))
    assert not runs.exists()


@pytest.mark.usefixtures("world")
def test_a_layer_that_cannot_be_built_is_refused() -> None:
    with refused("model.extra", rule=("AssertionError", "cpu_offloading_num_layers")):
        built(with_extra(cpu_offloading=True, cpu_offloading_num_layers=1))


@pytest.mark.usefixtures("world")
def test_what_a_layer_refuses_in_its_first_pass_is_one_error() -> None:
    made = built(tiny(model={**EXPERTS, "extra": {"moe_apply_probs_on_input": True}}))
    with refused("model.extra", rule=("AssertionError", "moe_router_topk", "moe_apply_probs_on_input")):
        computed(made.module)


def test_memory_that_is_short_is_not_its_fault() -> None:
    with pytest.raises(torch.OutOfMemoryError), accepted_by_core({"softmax_scale": 0.5}):
        raise torch.OutOfMemoryError


def test_an_error_without_extra_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_config: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(TransformerConfig, "__post_init__", broken)
    with pytest.raises(ValueError, match="a bug"):
        transformer_config(derive(tiny(), 1, ROOMY), on_gpu=False, transformer_engine=False)


def test_a_field_reaches_transformer_engines_layers() -> None:
    plan = derive(with_extra(layernorm_zero_centered_gamma=True), 1, ROOMY)
    made = transformer_config(plan, on_gpu=True, transformer_engine=True)
    assert made.layernorm_zero_centered_gamma


# -- what it computes ------------------------------------------------------------------------------------------------


def computed(module: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses of fixed tokens, and the gradient of each weight."""
    ids = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(4))
    losses = module(ids, torch.arange(16).expand(2, -1), None, labels=ids.roll(-1, 1), loss_mask=torch.ones(ids.shape))
    losses.mean().backward()
    return losses, {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    "extra",
    [
        {"softmax_scale": 0.5},
        {"rotary_interleaved": True}, {"no_rope_freq": [0, 1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_computes_what_it_does_in_megatron_cores_model(extra: dict[str, Any]) -> None:
    """Its `GPTModel`, built from a configuration on which the fields are set by hand, has the same numbers."""
    recipes = [tiny(model={**LLAMA, "extra": values}) for values in ({}, extra)]
    plain, ours = (built(recipe) for recipe in recipes)
    by_hand = copy(plain.config)
    for name, value in extra.items():
        setattr(by_hand, name, value)
    theirs = gpt_of(recipes[0], replace(plain, config=by_hand))
    theirs.compute_language_model_loss = ours.module.compute_language_model_loss
    (mine, my_gradients), (other, other_gradients) = computed(ours.module), computed(theirs)
    assert torch.equal(mine, other)
    assert my_gradients.keys() == other_gradients.keys()
    assert not [name for name in my_gradients if not torch.equal(my_gradients[name], other_gradients[name])]
    losses, gradients = computed(plain.module)
    assert not torch.equal(losses, mine)
    assert any(not torch.equal(gradients[name], my_gradients[name]) for name in gradients)


@pytest.mark.usefixtures("world")
def test_a_field_without_an_effect_here_changes_nothing() -> None:
    plain, ours = (built(tiny(model={**LLAMA, "extra": values})) for values in ({}, {"barrier_with_L1_time": False}))
    assert ours.config.barrier_with_L1_time is False
    assert torch.equal(computed(plain.module)[0], computed(ours.module)[0])


# -- identity, and what is said of it --------------------------------------------------------------------------------


def test_it_is_part_of_the_identity() -> None:
    plain, one, other = tiny(), with_extra(softmax_scale=0.5), with_extra(softmax_scale=0.25)
    assert len({recipe_hash(recipe) for recipe in (plain, one, other)}) == 3
    values = [recipe.model_dump(mode="json") for recipe in (plain, one, other)]
    for now, then in ((1, 2), (0, 1), (1, 0)):
        (difference,) = compatibility(values[now], values[then])
        assert difference.key == "model.extra.softmax_scale"
    assert compatibility(values[1], values[1]) == []
    del values[0]["model"]["extra"]  # a run of a version without the key
    assert compatibility(tiny().model_dump(mode="json"), values[0]) == []


def test_a_plan_and_a_shown_recipe_say_that_it_is_not_verified(capsys: pytest.CaptureFixture[str]) -> None:
    change, words = "model.extra.softmax_scale=0.5", "model.extra is not verified here: softmax_scale"
    for command in (["show"], ["plan", "--details"], ["plan", "--cluster", "h100-ib"]):
        assert run([command[0], "gpt-tiny", change, *command[1:]]) == 0
        shown = capsys.readouterr().out
        assert shown.count(words) == 1, shown
        assert run([command[0], "gpt-tiny", *command[1:]]) == 0
        assert "not verified here" not in capsys.readouterr().out


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The recipe of a run."""
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(with_extra(softmax_scale=0.5)), "utf-8")
    return path


def test_a_new_model_that_must_compute_the_same_is_refused(recorded: Path) -> None:
    with refused("model.extra", rule="softmax_scale"):
        load_upcycled(recorded, ["model.num_moe_experts=4", "model.add_bias_linear=false"])
    with refused("model.extra", rule="softmax_scale"):
        load_grown(recorded, Growth(layers=4), [])


def test_a_pruned_and_a_converted_model_keep_it(recorded: Path) -> None:
    half = PruneOptions(method="depth", ratio=0.5)
    _, pruned = load_pruned(recorded, [], half)
    assert pruned.model.extra == {"softmax_scale": 0.5}
    with refused("model.extra", rule=("0.25", "0.5")):
        load_pruned(recorded, ["model.extra.softmax_scale=0.25"], half)
    converted_to = converted_recipe(recorded, "deepspeed", ["layout.zero.stage=1"])
    assert converted_to.model.extra == {"softmax_scale": 0.5}
    with refused(recorded.parent, rule="model.extra.softmax_scale"):
        converted_recipe(recorded, "deepspeed", ["layout.zero.stage=1", "model.extra.softmax_scale=0.25"])


def test_an_export_is_refused_with_the_reason() -> None:
    with refused("model.extra", rule=("megatron-core", "0.5")):
        family_of(tiny(model={**LLAMA, "add_bias_linear": False, "extra": {"softmax_scale": 0.5}}).model)
