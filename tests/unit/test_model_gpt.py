"""The model against megatron-core's own attention and loss, and itself without recomputation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from llmrecipes.engine.core.model.attention import SdpaCoreAttention
from llmrecipes.engine.core.model.config import transformer_config
from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.engine.core.model.layer_spec import choose
from llmrecipes.hardware import builds
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe
from tests.helpers import LLAMA, MODEL, ROOMY, ROOT, built, engine_of, environment, steps, tiny
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("world")

LENGTH, HEADS, HIDDEN = 64, 4, 64


def randomised(**model: Any) -> RecipeModel:
    """A model whose biases and norms are random too, in evaluation mode."""
    module = built(tiny(model=model)).module.eval()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.1)
    return module


def inputs(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(512, (batch, LENGTH), generator=torch.Generator().manual_seed(4))
    return ids, torch.arange(LENGTH).expand(batch, -1)


def logits(module: torch.nn.Module) -> torch.Tensor:
    ids, positions = inputs()
    with torch.no_grad():
        found: torch.Tensor = module(ids, positions, None)
    return found


def test_no_token_sees_a_later_one() -> None:
    module = randomised(**LLAMA)
    ids, positions = inputs()
    changed = ids.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 512
    with torch.no_grad():
        before, after = (module(each, positions, None) for each in (ids, changed))
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


# -- attention and loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
def test_attention_is_megatron_cores(groups: int) -> None:
    config = built(tiny(model={"num_query_groups": groups})).config
    random = torch.Generator().manual_seed(1)
    heads = (HEADS, groups, groups)
    leaves = [torch.randn(LENGTH, 2, h, 16, generator=random, requires_grad=True) for h in heads]
    weight = torch.randn(LENGTH, 2, HIDDEN, generator=random)
    options: dict[str, Any] = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    mask = torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1).bool()[None, None]
    ours = SdpaCoreAttention(config, **options)(*leaves, None)
    theirs = DotProductAttention(config, **options)(*leaves, mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad((out * weight).sum(), leaves) for out in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_a_fraction_of_the_rotary_base_counts() -> None:
    frequencies = built(tiny(model={**LLAMA, "rotary_base": 10000.5})).module.rotary_pos_emb.inv_freq
    channels = 2 * len(frequencies)
    expected = torch.tensor([10000.5 ** -(2 * index / channels) for index in range(len(frequencies))])
    assert torch.allclose(frequencies, expected, rtol=1e-6, atol=0)


def test_attention_refuses_a_bias_it_would_ignore() -> None:
    attention = SdpaCoreAttention(built(tiny()).config, 1, AttnMaskType.causal, "self")
    q = torch.zeros(4, 1, HEADS, 16)
    with pytest.raises(NotImplementedError, match="causal"):
        attention(q, q, q, None, attention_bias=torch.zeros(1, 1, 4, 4))


def test_loss_is_megatron_cores() -> None:
    module = randomised()
    ids, positions = inputs()
    labels = ids.roll(-1, 1)
    ours = module(ids, positions, None, labels=labels)
    assert ours.shape == labels.shape
    theirs = vocab_parallel_cross_entropy(logits(module).transpose(0, 1).contiguous(), labels.t().contiguous())
    torch.testing.assert_close(ours, theirs.t(), rtol=1e-6, atol=1e-6)


def test_label_smoothing_changes_the_training_loss_only() -> None:
    def losses(smoothing: float) -> dict[str, torch.Tensor]:
        module = built(tiny(train={"label_smoothing": smoothing})).module
        ids, positions = inputs()
        with torch.no_grad():
            return {
                "train": module.train()(ids, positions, None, labels=ids),
                "eval": module.eval()(ids, positions, None, labels=ids),
                "expected": F.cross_entropy(
                    module(ids, positions, None).flatten(0, 1),
                    ids.flatten(),
                    reduction="none",
                    label_smoothing=smoothing,
                ).view_as(ids),
            }

    plain, smoothed = losses(0.0), losses(0.2)
    assert torch.equal(plain["eval"], smoothed["eval"])
    assert torch.equal(plain["train"], plain["eval"])
    torch.testing.assert_close(smoothed["train"], smoothed["expected"], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(smoothed["train"], plain["train"], rtol=1e-3)


# -- layer implementation and options --------------------------------------------------------------------------------


def test_a_requested_implementation_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("model.transformer_impl", rule="GPU"):
        choose(layers("transformer_engine"))
    assert choose(layers("auto")) == ("local", "no GPU")
    assert choose(layers("local"))[0] == "local"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with refused("model.transformer_impl", rule="TransformerEngine"):
        choose(layers("transformer_engine"))
    assert choose(layers("auto")) == ("local", "TransformerEngine is not installed")


def layers(implementation: str, precision: str = "bf16", **sections: Any) -> Recipe:
    """A recipe in which no rule but the tested one says which layers it has."""
    return tiny(model={"transformer_impl": implementation}, train={"precision": precision}, **sections)


@pytest.mark.parametrize(
    ("recipe", "chosen", "word"),
    [
        (layers("auto"), "transformer_engine", "installed"),
        (layers("auto", "fp32"), "local", "TF32"),
        (layers("transformer_engine", "fp32"), "transformer_engine", "TF32"),
        (layers("auto", layout={"zero": {"stage": 2}}), "local", "DeepSpeed"),
        (layers("transformer_engine", layout={"zero": {"stage": 2}}), "transformer_engine", "installed"),
    ],
    ids=lambda value: "" if isinstance(value, Recipe) else value,
)
def test_auto_takes_what_computes_as_the_recipe_says_and_was_tested(
    recipe: Recipe, chosen: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmrecipes.engine.core.model.layer_spec._transformer_engine_obstacle", lambda: None)
    implementation, reason = choose(recipe)
    assert implementation == chosen
    assert word in reason


def test_transformer_engine_is_not_imported_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GEMM and its optimizer, which megatron-core uses wherever it can import them, refuse other devices."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "stub_te")
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    builds.transformer_engine_obstacle.cache_clear()
    try:
        assert builds.transformer_engine_obstacle() == "no GPU"
        with pytest.raises(ImportError):
            import_module("transformer_engine")
    finally:
        sys.modules.pop("transformer_engine", None)
        builds.transformer_engine_obstacle.cache_clear()


# -- compilation -----------------------------------------------------------------------------------------------------


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "add_bias_linear": False}


@pytest.mark.parametrize(
    ("model", "graphs"),
    [(LLAMA, 3), ({**LLAMA, **EXPERTS, "moe_layer_freq": [0, 1, 1]}, 4)],
    ids=["dense", "experts"],
)
@pytest.mark.rotating
def test_all_layers_are_one_graph_which_is_compiled_once(model: dict[str, Any], graphs: int) -> None:
    """On rank 0 of initialised groups, where megatron-core warns; two graphs are the loss and its gradient."""
    module = built(tiny(model={"num_layers": 3, **model})).module
    ids, positions = inputs()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module.compile_layers(backend="eager")
    try:
        for step in range(3):  # tokens of each expert differ between them
            module(ids.roll(step), positions, None, labels=ids).mean().backward()
            counters = torch._dynamo.utils.counters
            assert not counters["graph_break"]
            assert counters["stats"]["unique_graphs"] == graphs
    finally:
        torch._dynamo.reset()


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Path]:
    """A folder with a TransformerEngine that was built for another CUDA."""
    package = tmp_path / "broken" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise OSError('libcublas.so.99: cannot open shared object file')\n")
    builds.transformer_engine_obstacle.cache_clear()
    yield package.parent
    sys.modules.pop("transformer_engine", None)
    builds.transformer_engine_obstacle.cache_clear()


def test_auto_survives_a_broken_transformer_engine_and_tells_why(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(broken)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    chosen, reason = choose(layers("auto"))
    assert chosen == "local"
    assert "OSError" in reason and "libcublas.so.99" in reason
    with refused("model.transformer_impl", rule=("OSError", "libcublas.so.99")):
        choose(layers("transformer_engine"))
    with pytest.raises(ImportError):  # which megatron-core handles, and OSError it does not
        import_module("transformer_engine")


@pytest.mark.slow
def test_engines_are_imported_beside_a_broken_transformer_engine(broken: Path) -> None:
    code = """
from llmrecipes.engine.backends import backend
from llmrecipes.recipe.load import load
backend(load("gpt-tiny", []).recipe)
"""
    path = {"PYTHONPATH": f"{broken}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment() | path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model", [{}, {"gated_linear_unit": True}, {"add_bias_linear": False}])
def test_exact_gelu_stays_exact_where_functions_are_fused(model: dict[str, Any]) -> None:
    """Large weights show it: at their initial size all activations are near 0, where the tanh approximation is too."""

    def values(compiled: bool) -> torch.Tensor:
        module = built(tiny(model=model, layout={"torch_compile": compiled})).module.eval()
        random = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.3)
        return logits(module)

    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(values(True), values(False), rtol=1e-6, atol=1e-5)


def test_pipeline_stages_free_what_they_have_sent_and_wait_for_nothing() -> None:
    def config(**parallelism: int) -> Any:
        made = tiny(model={"num_layers": 4}, layout=parallelism)
        plan = derive(made, parallelism.get("pipeline_model_parallel_size", 1), ROOMY)
        return transformer_config(plan, on_gpu=False, transformer_engine=False)

    two = config(pipeline_model_parallel_size=2)
    assert two.deallocate_pipeline_outputs
    assert not two.batch_p2p_sync
    assert not config().deallocate_pipeline_outputs
    chunks = config(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert chunks.deallocate_pipeline_outputs


RECOMPUTE: list[dict[str, Any]] = [
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
]


@pytest.mark.parametrize("changes", RECOMPUTE, ids=["selective", "full uniform", "full block"])
def test_recomputation_changes_no_number(changes: dict[str, Any]) -> None:
    """With dropout, so that a recomputed layer has to drop what it dropped the first time."""
    model = {"hidden_dropout": 0.1, "attention_dropout": 0.1}

    def curve(layout: dict[str, Any]) -> list[tuple[float, float | None]]:
        tensor_parallel.model_parallel_cuda_manual_seed(11, force_reset_rng=True)
        engine = engine_of(tiny(model=model, layout=layout))
        return [(result.loss, result.grad_norm) for result in steps(engine, 3)]

    plain = curve({})
    assert curve(changes) == plain
    assert len(set(plain)) == 3


@pytest.mark.parametrize(
    "model",
    [
        {"qk_layernorm": True},
        {"normalization": "RMSNorm", "qk_layernorm": True, "position_embedding_type": "rope"},
        {"activation_func": "squared_relu", "kv_channels": 32, "add_bias_linear": False, "add_qkv_bias": True},
        {**LLAMA, "rotary_percent": 0.5, "num_query_groups": 1},
        {
            **EXPERTS, "moe_router_load_balancing_type": "none", "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
    ],
    ids=["qk norm", "qk norm rope", "squared relu", "half rope", "expert bias"],
)  # fmt: skip
def test_other_shapes_learn_without_a_compiler(model: dict[str, Any]) -> None:
    engine = engine_of(tiny(model={**MODEL, **model}, optimizer={"lr": 3e-3}))
    assert all(parameter.requires_grad for parameter in engine.modules[0].parameters())
    with torch.compiler.set_stance("fail_on_recompile"):
        results = steps(engine, 12)
    assert results[-1].loss < results[0].loss - 0.5


def test_a_feature_that_needs_a_compiler_is_off_without_one_and_the_run_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llama = {"activation_func": "silu", "gated_linear_unit": True}
    monkeypatch.setenv("CXX", "no-such-compiler")
    made = built(tiny(model=llama, layout={"torch_compile": True}))
    assert not made.config.bias_activation_fusion
    assert "layout.bias_activation_fusion" in made.reason and "no-such-compiler" in made.reason
    with refused("layout.bias_activation_fusion", rule="no-such-compiler"):
        built(tiny(model=llama, layout={"bias_activation_fusion": True}))


def test_a_variable_that_contradicts_the_attention_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    with refused("NVTE_FLASH_ATTN", rule="layout.attention_backend"):
        built(tiny())
