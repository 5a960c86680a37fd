"""Ranks of large worlds without data: the plan's memory and traffic against the real code, and host waits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.drawn_layouts import CLOSE, described, deviations, drawn, planned_bytes, sent_bytes
from benchmarks.former import ADAMW
from llmrecipes.cli import app as cli
from llmrecipes.dryrun.dry_run_spec import PARTS, DryRunSpec, RankReport
from llmrecipes.dryrun.pictures import memory_svg, passes_svg
from llmrecipes.engine.core.checkpoint import format as checkpoint_format
from llmrecipes.files import recipes_dir
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import planned
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.plan.memory import communicators
from llmrecipes.plan.speed.choice import choose
from llmrecipes.plan.traffic import SMALL
from llmrecipes.recipe.derived.degrees import model_parallel_size, smallest_world
from llmrecipes.recipe.derived.stage_runs import as_run, stage_named, stage_recipes
from llmrecipes.recipe.derived.stages import span_of
from llmrecipes.recipe.engines import MEGATRON, engine_name
from llmrecipes.recipe.load import load, names
from llmrecipes.recipe.schema import Recipe
from llmrecipes.units import GIB
from tests.dist.test_checkpoint_scale import held_and_sent, read_on_resume
from tests.dist.worlds import GlooWorld
from tests.helpers import ROOT
from tests.refusals import require_message

Report = dict[str, Any]


def dry_runs(specs: list[str]) -> list[Report]:
    """Job of a process of its own: megatron-core stays patched."""
    from llmrecipes.dryrun.simulation import dry_run

    found = []
    for text in specs:
        spec = DryRunSpec.model_validate_json(text)
        found += [dry_run(spec, rank).model_dump() for rank in spec.ranks]
    return found


def drawn_deviations(numbers: list[int]) -> dict[str, list[dict[str, Any]]]:
    """Plan against dry run of each stage of drawn layouts, by layout; job as `dry_runs`."""
    specs = {number: drawn(number) for number in numbers}
    return {
        f"{number}: {described(spec)}": [found._asdict() for found in deviations(spec)]
        for number, spec in specs.items()
    }


def waits_with(text: str, owner: type, name: str, reading: Callable[..., Any]) -> dict[str, int]:
    """Host waits of a step with another method of the engine, which is given the original; job as `dry_runs`."""
    from llmrecipes.dryrun.simulation import dry_run

    spec = DryRunSpec.model_validate_json(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, partialmethod(reading, getattr(owner, name)))
        return dry_run(spec, spec.ranks[0]).waits


def waits_with_a_read_added(text: str) -> dict[str, int]:
    """The engine makes a tensor of each loss."""
    import torch

    from llmrecipes.engine.megatron.engine import MegatronEngine

    def reading(engine: MegatronEngine, plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        outputs = plain(engine, *args, **options)
        torch.tensor([output["loss"][0] for output in outputs])
        return outputs

    return waits_with(text, MegatronEngine, "_passes", reading)


@pytest.fixture(scope="module")
def process(worlds: object) -> Iterator[GlooWorld]:
    """One that only runs dry runs."""
    alone = GlooWorld(1)
    yield alone
    alone.close()


def spec(name: str, *overrides: str, **options: Any) -> str:
    return spec_of(load(name, list(overrides)).recipe, **options)


def spec_of(recipe: Recipe, world: int | None = None, ranks: tuple[int, ...] = (0,), skew: float = 1.0) -> str:
    size = world or smallest_world(recipe.layout)
    found = DryRunSpec(recipe=recipe, cluster=planned("h100-ib", None, size), world_size=size, ranks=ranks, skew=skew)
    return found.model_dump_json()


def plan_of(text: str) -> Plan:
    asked = DryRunSpec.model_validate_json(text)
    return derive(asked.recipe, asked.world_size, asked.cluster)


def run(process: GlooWorld, *specs: str) -> list[Report]:
    found: list[Report] = process.start(dry_runs, list(specs), group=False).result()
    return found


MOVING = ("activations", "communication", "temporary")


def require_planned(report: Report) -> None:
    """Model states exactly, but for what pads an optimizer's share of a buffer; activations within 3 %, and with what
    exists at their peak only at most 3 % less."""
    memory, expected = report["memory"], report["planned"]
    assert memory["weights"] == expected["weights"]
    assert memory["gradients"] == expected["gradients"]
    assert memory["optimizer"] == pytest.approx(expected["optimizer"], rel=1e-4)
    if expected["activations"]:
        assert expected["activations"] == pytest.approx(memory["activations"], rel=CLOSE)
    else:  # the peak is Muon's update; what its ranks gather is communication in a dry run
        parts = ("activations", "communication", "temporary")
        update, planned = (sum(each.get(part, 0) for part in parts) for each in (memory, expected))
        assert planned == pytest.approx(update, rel=CLOSE)
    assert report["planned_most_activations"] == pytest.approx(report["most_activations"], rel=CLOSE)
    moving, planned = (sum(each[part] for part in MOVING) for each in (memory, expected))
    assert moving * (1 - CLOSE) <= planned <= moving * (1 + 2 * CLOSE)


def require_traffic(report: Report, plan: Plan, *, padding: float = 0.0) -> None:
    """The plan's bytes of each collective, beside bookkeeping, and what pads buffers to a multiple of their ranks."""
    expected, real = planned_bytes(plan, report["stage"]), sent_bytes(RankReport.model_validate(report))
    for key in expected | real:
        most = expected[key] * (1 + padding) + SMALL * (1 if not padding else sum_of_calls(report, key))
        assert expected[key] <= real[key] <= most, (report["stage"], key)


def sum_of_calls(report: Report, key: tuple[str, int]) -> int:
    return sum(each["calls"] for each in report["traffic"] if (each["op"], each["ranks"]) == key)


UNIFORM = ("layout.recompute_granularity=full", "layout.recompute_method=uniform", "layout.recompute_num_layers=1")
BLOCK = ("layout.recompute_granularity=full", "layout.recompute_method=block", "layout.recompute_num_layers=1")
WIDE = (
    "model.hidden_size=512", "model.ffn_hidden_size=2048", "model.seq_length=64", "layout.micro_batch_size=1",
    "train.global_batch_size=4",
)  # fmt: skip
adamw = partial(spec, "gpt-tiny", *ADAMW)
SMALL_WORLDS: dict[str, partial[str]] = {
    "one process": partial(spec, "gpt-tiny"),
    "bf16, overlapped": partial(
        adamw, "train.precision=bf16", "layout.micro_batch_size=2", "layout.overlap_grad_reduce=true",
        "layout.overlap_param_gather=true", world=4,
    ),
    "unfused attention": partial(
        adamw, "train.precision=bf16", "model.num_query_groups=2", "layout.attention_backend=unfused",
        "model.seq_length=512", "model.attention_dropout=0.1",
    ),
    "average of weights": partial(adamw, "train.precision=bf16", "optimizer.ema_decay=0.99", world=2),
    "tensor, pipeline": partial(spec, "gpt-tiny-3d", world=8, ranks=(0, 4)),
    "moved embeddings": partial(
        spec, "gpt-tiny-3d", "train.adversarial={type: pgd, epsilon: 0.5, alpha: 0.2, steps: 2}", world=4, ranks=(0, 2),
    ),
    "rounded weights": partial(
        spec, "gpt-tiny-3d", "qat.scheme=int8", world=4, ranks=(0, 2),
    ),
    "rounded experts in groups": partial(spec, "moe-tiny", "qat.scheme=int4", "qat.group_size=64", world=2),
    "context": partial(adamw, "layout.context_parallel_size=2", world=2),
    "experts": partial(spec, "moe-tiny", world=2),
    "adapters": partial(
        adamw, "lora.rank=8", "lora.dropout=0.1", "layout.tensor_model_parallel_size=2",
        "layout.sequence_parallel=true", "layout.micro_batch_size=2", world=4,
    ),
    "adapters of experts": partial(
        spec, "moe-tiny", "lora.rank=8", "lora.target_modules=[linear_qkv,experts.linear_fc1,experts.linear_fc2]",
        world=2,
    ),
    "packed conversations, grouped queries": partial(
        spec, "sft-tiny", "model.num_query_groups=2", "model.seq_length=512", "model.qk_layernorm=false", world=2
    ),
    "packed conversations by boundaries": partial(
        spec, "sft-tiny", "model.num_query_groups=2", "model.seq_length=512", "model.qk_layernorm=false",
        "train.precision=bf16", "layout.micro_batch_size=1", world=2
    ),
    "loss in chunks": partial(adamw, "layout.loss_chunk_tokens=128", world=2),
    "loss in chunks, split": partial(
        adamw, "layout.loss_chunk_tokens=128", "train.precision=bf16", "layout.micro_batch_size=2",
        "layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true",
        "model.share_embeddings_and_output_weights=false", "layout.pipeline_model_parallel_size=2",
        world=4, ranks=(0, 2),
    ),
    "loss in chunks, adapters": partial(
        adamw, "layout.loss_chunk_tokens=128", "lora.rank=8", "layout.tensor_model_parallel_size=2",
        "layout.sequence_parallel=true", "layout.micro_batch_size=2", world=2,
    ),
    "recomputed MLP": partial(
        adamw, "layout.recompute_granularity=selective", "layout.recompute_modules=[mlp]",
        "layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true", "layout.micro_batch_size=2",
        "layout.pipeline_model_parallel_size=2", world=4, ranks=(0, 2),
    ),
    "recomputed experts": partial(
        spec, "moe-tiny", "layout.recompute_granularity=selective", "layout.recompute_modules=[moe,layernorm]",
        "layout.micro_batch_size=4", "layout.cross_entropy_loss_fusion=false",
        world=2  # so that the loss takes the most
    ),
    "written stages": partial(
        adamw, "model.num_layers=4", "layout.pipeline_model_parallel_size=2",
        "layout.virtual_pipeline_model_parallel_size=2", "layout.pipeline_model_parallel_layout=E|ttt|t|L",
        "layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true", "layout.micro_batch_size=2",
        world=4, ranks=(0, 2),
    ),
    "written stages, more tokens": partial(
        adamw, "model.num_layers=5", "layout.pipeline_model_parallel_size=2",
        "layout.virtual_pipeline_model_parallel_size=2", "layout.pipeline_model_parallel_layout=Et|tt|tt|mL",
        "model.mtp_num_layers=1", "model.position_embedding_type=rope",
        "model.share_embeddings_and_output_weights=false", "layout.micro_batch_size=2", *BLOCK, world=2, ranks=(0, 1),
    ),
    # The matrices are so large beside the activations that the update takes the most.
    "Muon": partial(
        spec, "gpt-tiny", *WIDE, "model.num_query_groups=2", "layout.tensor_model_parallel_size=2",
        "layout.sequence_parallel=true", world=4,
    ),
    "Muon in bf16, queries and keys apart": partial(
        spec, "gpt-tiny", *WIDE, "model.ffn_hidden_size=256", "train.precision=bf16",
        "optimizer.muon_fp32_matmul_prec=medium",
    ),
    "Muon on shards": partial(
        spec, "gpt-tiny", *WIDE, "layout.tensor_model_parallel_size=2", "optimizer.muon_tp_mode=distributed",
        "optimizer.muon_split_qkv=false", "optimizer.muon_nesterov=false", world=2,
    ),
    "Muon of experts": partial(
        spec, "moe-tiny", "optimizer={optimizer: muon, lr: 1e-3}", "layout.use_distributed_optimizer=false",
        "model.num_layers=2", "model.hidden_size=1024", "model.moe_ffn_hidden_size=4096", "model.seq_length=64",
        "layout.micro_batch_size=1", "train.global_batch_size=4", world=2,
    ),
    "gpt-oss's experts": partial(
        spec, "moe-tiny", "model.add_bias_linear=true", "model.activation_func=quick_gelu",
        "model.gated_linear_unit=true", "model.activation_func_clamp_value=7", "model.glu_linear_offset=1",
        "model.moe_layer_freq=2", "layout.micro_batch_size=4", "layout.tensor_model_parallel_size=2",
        "layout.sequence_parallel=true", "layout.expert_tensor_parallel_size=1",
        "layout.expert_model_parallel_size=2", world=2,
    ),
    "shared experts beside the all-to-all": partial(
        spec, "moe-tiny", "model.moe_shared_expert_intermediate_size=256", "layout.micro_batch_size=4",
        "layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true",
        "layout.expert_tensor_parallel_size=1", "layout.expert_model_parallel_size=2", world=2,
    ),
    "recomputed latent attention": partial(
        spec, "moe-tiny", "layout.recompute_granularity=selective", "model.qk_head_dim=32",
        "model.qk_pos_emb_head_dim=16",
        "layout.recompute_modules=[mla_up_proj,shared_experts,layernorm]", "model.multi_latent_attention=true",
        "model.position_embedding_type=rope",
        "model.num_query_groups=null", "model.kv_lora_rank=48", "model.q_lora_rank=64", "model.v_head_dim=32",
        "model.moe_shared_expert_intermediate_size=256", "layout.micro_batch_size=4",
        "layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true",
        "layout.expert_tensor_parallel_size=1", "layout.expert_model_parallel_size=2", world=2
    ),
}  # fmt: skip


ALWAYS = (
    "one process", "bf16, overlapped", "tensor, pipeline", "context", "experts", "adapters", "loss in chunks",
    "recomputed MLP", "written stages",
)  # fmt: skip
"""Those that each commit runs. The others combine them with more options, and take turns."""


def ranks_of(name: str) -> list[str]:
    """Names of the ranks of a small world that are run."""
    return [f"{name}, rank {rank}" for rank in SMALL_WORLDS[name].keywords.get("ranks", (0,))]


@pytest.fixture(scope="module")
def small(process: GlooWorld, request: pytest.FixtureRequest) -> dict[str, Report]:
    """Reports of the ranks of small worlds: of `ALWAYS`, and of those whose turn it is."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("name") for item in items if item.path == request.path}
    wanted = [name for name in SMALL_WORLDS if name in ALWAYS or asked.intersection(ranks_of(name))]
    found = iter(run(process, *(SMALL_WORLDS[name]() for name in wanted)))
    return {rank: next(found) for name in wanted for rank in ranks_of(name)}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(rank, marks=() if name in ALWAYS else pytest.mark.rotating(f"dry run of {name}"))
        for name in SMALL_WORLDS
        for rank in ranks_of(name)
    ],
)
def test_the_plan_is_what_the_real_code_does(name: str, small: dict[str, Report]) -> None:
    report, plan = small[name], plan_of(SMALL_WORLDS[name.rpartition(",")[0]]())
    require_planned(report)
    if not plan.recipe.model.mtp_num_layers or report["stage"] < plan.layout.pipeline_model_parallel_size - 1:
        require_traffic(report, plan)  # no formulas for the layers there


@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
def test_a_last_stage_is_planned_with_all_that_its_loss_takes(sequence_parallel: str, process: GlooWorld) -> None:
    """The gathered input of the output layer, its gradients, and the gradient that was sent to the stage before."""
    text = spec(
        "gpt-tiny", *ADAMW, "train.precision=bf16", "layout.micro_batch_size=8",
        "layout.pipeline_model_parallel_size=2", "layout.tensor_model_parallel_size=2",
        f"layout.sequence_parallel={sequence_parallel}", "model.hidden_size=1024", world=4, ranks=(2,),
    )  # fmt: skip
    (report,) = run(process, text)
    require_planned(report)
    assert sum(report["planned"].values()) == pytest.approx(sum(report["memory"].values()), rel=2e-3)


@pytest.mark.parametrize(
    "layout",
    [
        ["model.num_layers=5", "layout.virtual_pipeline_model_parallel_size=2",
         "layout.pipeline_model_parallel_layout=Et|tt|tt|mL"],
        ["model.num_layers=4", "layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true"],
    ],
    ids=["no layers of the decoder beside it", "gathered tokens"],
)  # fmt: skip
@pytest.mark.parametrize("recomputed", [False, True], ids=["nothing recomputed", "recomputed"])
def test_a_stage_that_predicts_further_tokens_is_planned_whole(
    recomputed: bool, layout: list[str], process: GlooWorld
) -> None:
    """The predictions' inputs until their layers are differentiated, and the gradients of inputs that are held."""
    world = 4 if "layout.tensor_model_parallel_size=2" in layout else 2
    text = spec(
        "gpt-tiny", *ADAMW, "train.precision=bf16", "layout.micro_batch_size=2", "train.global_batch_size=8",
        "model.hidden_size=512", "model.ffn_hidden_size=1408", "model.num_attention_heads=8", "model.seq_length=1024",
        "model.vocab_size=8192", "model.position_embedding_type=rope", "model.mtp_num_layers=1",
        "model.share_embeddings_and_output_weights=false", "layout.pipeline_model_parallel_size=2", *layout,
        *UNIFORM * recomputed, world=world, ranks=(world // 2,),
    )  # fmt: skip
    (report,) = run(process, text)
    require_planned(report)
    moving, planned = (sum(report[memory][part] for part in MOVING) for memory in ("memory", "planned"))
    assert planned == pytest.approx(moving, rel=0.02)


small_gpt = partial(
    adamw, "train.precision=bf16", "model.hidden_size=512", "model.ffn_hidden_size=1664", "model.num_attention_heads=8",
    "model.num_query_groups=2", "model.seq_length=512", "model.vocab_size=1024", "model.position_embedding_type=rope",
    "model.share_embeddings_and_output_weights=false", "layout.micro_batch_size=1", "train.global_batch_size=8",
)  # fmt: skip
few = partial(small_gpt, "model.seq_length=64")
interleaved = partial(
    small_gpt, "model.num_layers=8", "layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true",
    "layout.pipeline_model_parallel_size=2", "layout.virtual_pipeline_model_parallel_size=2", world=4, ranks=(0, 2),
)  # fmt: skip
few_experts = partial(
    spec, "moe-tiny", "optimizer={optimizer: adam, lr: 1e-3}", "train.precision=bf16", "model.hidden_size=512",
    "model.seq_length=64", "model.vocab_size=1024", "layout.micro_batch_size=1", "train.global_batch_size=8", world=2,
)  # fmt: skip
WHOLE_BLOCK = (*BLOCK[:2], "layout.recompute_num_layers=2")
ADAPTED = ("lora.rank=8", "model.share_embeddings_and_output_weights=true", "layout.micro_batch_size=8")
IN_16_BITS = ("train.precision=bf16", "train.grad_reduce_in_fp32=false")
UNGATED = ("model.gated_linear_unit=false", "model.activation_func=gelu")
GATED = ("model.gated_linear_unit=true", "model.activation_func=silu")
TIED = "model.share_embeddings_and_output_weights=true"
# Of a few tokens the gradients of weights are larger than those of activations.
MOMENTS: dict[str, partial[str]] = {
    "first product": few,
    "first product, tensor parallel": partial(
        few, "layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true", world=2
    ),
    "first product, recomputed in each chunk": partial(interleaved, "model.seq_length=64", *WHOLE_BLOCK),
    "first product, some layers recomputed": partial(interleaved, "model.seq_length=64", *BLOCK),
    "product of experts": partial(few_experts, "model.moe_ffn_hidden_size=2048", *GATED),
    "product of shared experts": partial(
        few_experts, "model.moe_ffn_hidden_size=256", "model.moe_shared_expert_intermediate_size=2048"
    ),
    "product of attention": partial(few_experts, "model.moe_ffn_hidden_size=256"),
    "tied embedding, layers": partial(small_gpt, TIED),
    "tied embedding, first product": partial(few, TIED),
    "tied embedding, its sum": partial(few, TIED, "model.vocab_size=8192"),
    "tied embedding, loss in chunks": partial(few, TIED, "layout.loss_chunk_tokens=32"),
    "tied embedding, predictions": partial(few, TIED, "model.mtp_num_layers=1"),
    "embedding read by predictions": partial(few, "model.mtp_num_layers=1"),
    "frozen embedding": partial(few, TIED, "train.freeze=[embedding.*]"),
    "chunk's output and gradient sent": partial(interleaved, *UNIFORM),
    "adapter of the first product": partial(small_gpt, *ADAPTED),
    "adapter of the second product": partial(small_gpt, *ADAPTED, *UNIFORM, *UNGATED),
    "copied gradients": partial(adamw, *WIDE, *IN_16_BITS, world=2),
    "copied gradients of experts": partial(few_experts, "train.grad_reduce_in_fp32=false"),
    "copied gradients, Muon": partial(spec, "gpt-tiny", *WIDE, *IN_16_BITS),
    "Lion": partial(spec, "gpt-tiny", *WIDE, "optimizer={optimizer: lion, lr: 1e-3}"),
    "distillation": partial(spec, "gpt-tiny-distil"),
    "distillation in bf16": partial(spec, "gpt-tiny-distil", "train.precision=bf16"),
    "distillation of a few tokens": partial(spec, "gpt-tiny-distil", "distill.top_k=16"),
    "distillation of differences": partial(spec, "gpt-tiny-distil", "distill.loss=mse", "distill.temperature=1.0"),
    "distillation of stored logits": partial(spec, "gpt-tiny-distil", "distill.top_k=16", "distill.logits=there"),
    "distillation, tensor parallel": partial(
        spec, "gpt-tiny-distil", "layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true", world=2
    ),
}  # fmt: skip
"""Stages whose fullest moment is named: of layers, of the schedule, of the loss or of the update."""


@pytest.mark.parametrize("name", MOMENTS)
def test_the_fullest_moment_is_planned(name: str, process: GlooWorld) -> None:
    for report in run(process, MOMENTS[name]()):
        moving, planned = (sum(report[memory][part] for part in MOVING) for memory in ("memory", "planned"))
        assert planned == pytest.approx(moving, rel=0.02)


def test_the_plan_has_a_communicator_for_every_group(small: dict[str, Report]) -> None:
    for name, report in small.items():
        plan = plan_of(SMALL_WORLDS[name.rpartition(",")[0]]())
        planned = communicators(plan.recipe, plan.shape, plan.layout)
        assert {each["group"]: each["ranks"] for each in report["traffic"]} == planned, name


def test_the_host_waits_once_a_step(small: dict[str, Report]) -> None:
    """For the loss with the stop flag; with experts, once more in each of their forward passes, for their tokens."""
    page = (ROOT / "docs" / "reference" / "dryrun.md").read_text("utf-8")
    for name, report in small.items():
        waits = dict(report["waits"])
        ours = [f"{place} × {waits.pop(place)}" for place in report["waits"] if place.startswith("megatron/engine")]
        assert len(ours) == 1 and ours[0].endswith(" × 1") and ours[0] in page, name
        plan = plan_of(SMALL_WORLDS[name.rpartition(",")[0]]())
        if not plan.recipe.model.num_moe_experts:
            assert not waits, name
            continue
        ((place, number),) = waits.items()
        assert place.startswith("moe/token_dispatcher")
        passes = 2 if "moe" in plan.recompute_modules else 1  # the recomputation dispatches the tokens again
        assert number == passes * plan.shape.moe_layers(0, plan.shape.num_layers) * plan.num_microbatches


def test_a_host_wait_that_is_added_is_seen(process: GlooWorld) -> None:
    """Scalars of the device in `torch.tensor`, of which no operation tells; one for each micro-batch."""
    text = SMALL_WORLDS["one process"]()
    waits: dict[str, int] = process.start(waits_with_a_read_added, text, group=False).result()
    assert sum(waits.values()) == 1 + plan_of(text).num_microbatches
    assert any("test_dryrun" in place for place in waits)


def test_passes_are_those_of_1f1b(small: dict[str, Report]) -> None:
    """Narayanan et al. 2021 (arXiv 2104.04473), figure 4: two stages, four micro-batches."""
    orders = [
        "".join(f"{each['kind'][0]}{each['micro_batch']}" for each in small[f"tensor, pipeline, rank {rank}"]["passes"])
        for rank in (0, 4)
    ]
    assert orders == ["f0f1b0f2b1f3b2b3", "f0b0f1b1f2b2f3b3"]


def test_groups_across_nodes_are_told_from_those_on_one(process: GlooWorld) -> None:
    (report,) = run(process, spec("gpt-tiny-3d", "train.global_batch_size=64", world=16))
    nodes = {each["group"]: each["node_local"] for each in report["traffic"]}
    assert nodes["tp"]
    assert nodes["dp-cp"]
    assert not nodes["pp"]


def test_a_skewed_routing_needs_more_memory(process: GlooWorld) -> None:
    even, skewed = run(process, spec("moe-tiny", world=2), spec("moe-tiny", world=2, skew=2.0))
    assert skewed["memory"]["activations"] > even["memory"]["activations"]


def test_experts_whose_tokens_are_gathered_are_planned(process: GlooWorld) -> None:
    keys = ("model.moe_token_dispatcher_type=allgather", "layout.expert_model_parallel_size=2")
    (report,) = run(process, spec("moe-tiny", *keys, world=2))
    require_planned(report)


def test_progress_counts_every_pass_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmrecipes.dryrun import simulation

    monkeypatch.setattr(simulation, "REPORT_SECONDS", -1.0)
    lines: list[str] = []
    begun = simulation._progress(plan_of(spec("gpt-tiny-3d", world=8)), 2, lines.append)
    begun(1)
    begun(16)
    assert "1 of 16" in lines[0] and "16 of 16, about 0.0s" in lines[1]


@pytest.mark.rotating
def test_a_rank_of_gpt_175b_takes_seconds_and_no_memory(process: GlooWorld) -> None:
    """Eight micro-batches of the first of eight stages, on 1,024 ranks."""
    text = spec("gpt-175b", "train.global_batch_size=256", world=1024)
    (report,) = run(process, text)
    require_planned(report)
    assert sum(report["memory"].values()) > 30 * GIB
    assert sum(report["waits"].values()) == 1
    require_traffic(report, plan_of(text), padding=1e-4)
    # Of bf16 weights, master weights and two moments: all are written, and all but the weights are read.
    assert report["resume"]["read_bytes"] == pytest.approx(report["save"]["written_bytes"] * 12 / 14, rel=1e-3)
    assert report["resume"]["held_bytes"] < report["resume"]["read_bytes"] / 10
    (gathered,) = report["resume"]["traffic"]
    assert gathered["op"] == "all-gather" and gathered["bytes"] >= report["memory"]["weights"]


def whole_recipes() -> Iterator[Any]:
    """Recipes with megatron-core, each with the first of its stages, if it has some, that have a layout."""
    for name in names(recipes_dir()):
        recipe = load(name, []).recipe
        if engine_name(recipe) == MEGATRON:
            by_layout = {stage.layout.model_dump_json(): stage for stage in reversed(stage_recipes(recipe))}
            for span in map(span_of, by_layout.values()):
                yield pytest.param(name, None if span is None else span.name)


def on_a_node(recipe: Recipe) -> Recipe:
    """With what eight H100 choose for it, if it leaves them its micro-batch."""
    if "micro_batch_size" in recipe.layout.model_fields_set:
        return recipe
    choice = choose(recipe, planned("h100-ib", 1, 8), 8, load_profile("h100-ib"))
    return recipe if choice is None else choice.recipe


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(("name", "of_run"), list(whole_recipes()), ids=lambda value: value or "whole")
def test_the_stages_of_a_recipe_are_planned(name: str, of_run: str | None, process: GlooWorld) -> None:
    """The first two and the last: those between them differ in what is in flight only, which drawn layouts cover.

    With two micro-batches for each stage, after which a pipeline repeats itself.
    """
    loaded = load(name, []).recipe
    recipe = on_a_node(loaded) if of_run is None else stage_named(loaded, of_run)
    world, stages = smallest_world(recipe.layout), recipe.layout.pipeline_model_parallel_size
    replicas = world // model_parallel_size(recipe.layout)
    short = as_run(recipe)
    batch = recipe.layout.micro_batch_size * replicas * 2 * stages
    short = short.model_copy(update={"train": short.train.model_copy(update={"global_batch_size": batch})})
    for stage in sorted({0, min(1, stages - 1), stages - 1}):
        text = spec_of(short, world=world, ranks=(stage * world // stages,))
        (report,) = run(process, text)
        require_planned(report)
        if not recipe.model.mtp_num_layers or stage < stages - 1:  # no formulas for the layers there
            require_traffic(report, plan_of(text), padding=1e-3)


DRAWN = (0, 2, 5, 8, 9, 10, 11, 16, 19, 21, 22, 23, 30, 34, 37, 44, 47, 59)
"""Layouts that differ in what they need: device, precision, attention, experts and their dispatcher, recomputation."""


@pytest.mark.slow
def test_the_plan_is_what_drawn_layouts_do(process: GlooWorld) -> None:
    """Weights and gradients exactly, the optimizer but for padding, activations within 3 %, traffic by its formulas.

    `python -m benchmarks.dryrun --drawn 100` compares all of them.
    """
    found: dict[str, list[dict[str, Any]]] = process.start(drawn_deviations, list(DRAWN), group=False).result()
    for layout, stages in found.items():
        for number, each in enumerate(stages):
            assert (each["weights"], each["gradients"], each["traffic"]) == (0, 0, ()), (layout, number)
            assert abs(each["optimizer"]) < 1e-3, (layout, number)
            assert abs(each["most_activations"]) < CLOSE, (layout, number)


def held_in_slabs(recipe: Recipe, folder: Path) -> list[tuple[int, int, int]] | None:
    """Of each rank, with the buffers of a GPU's snapshots, which a dry run plans; job as `held_and_sent`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_format, "Staging", checkpoint_format.PinnedStaging)
        return held_and_sent(recipe, folder)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("distributed", [True, False], ids=["distributed optimizer", "whole optimizer"])
def test_a_save_and_a_resume_are_as_large_as_the_real_ones(
    distributed: bool, process: GlooWorld, worlds: dict[int, GlooWorld], tmp_path: Path
) -> None:
    """Of both ranks of gpt-tiny: what is held and read exactly, the file but for names and what frames its tensors."""
    sharded = f"layout.use_distributed_optimizer={str(distributed).lower()}"
    keys = (*ADAMW, "train.global_batch_size=16", sharded)
    recipe = load("gpt-tiny", list(keys)).recipe
    real = worlds[2].run(held_in_slabs, recipe, tmp_path)
    resumed = worlds[2].run(read_on_resume, recipe, tmp_path)
    reports = run(process, spec("gpt-tiny", *keys, world=2, ranks=(0, 1)))
    for report, sizes in zip(reports, resumed, strict=True):
        assert report["resume"]["read_bytes"] == sum(sizes)
        if distributed:  # other ranks cut what all of them have
            assert report["resume"]["held_bytes"] == max(sizes)
        gathered = [each for each in report["resume"]["traffic"] if each["op"] == "all-gather"]
        assert bool(gathered) == distributed
    for report, (held, file, _) in zip(reports, real, strict=True):
        assert report["save"]["held_bytes"] == held
        assert report["save"]["written_bytes"] <= file
        assert file == pytest.approx(report["save"]["written_bytes"], rel=0.01)


TENSOR = "layout.tensor_model_parallel_size"


def test_what_cannot_run_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = ("--runs-dir", str(tmp_path))
    for arguments, key, rule in (
        (("gpt-tiny-3d", "--rank", "8", "--cluster", "h100-ib", "--nodes", "1"), "--rank", "7"),
        (("gpt-tiny", "--rank", "0", "--stages"), "--rank", "--stages"),
        (("gpt-tiny", "--cluster", "no-such-cluster"), "no-such-cluster", "recipes/clusters/"),
        (("gpt-tiny", "layout.tensor_model_parallel_size=3"), TENSOR, "num_attention_heads"),
        (("gpt-1b", "layout=offload-24gb"), "layout.zero.offload_optimizer", "layout.zero.offload_optimizer=none"),
        (
            ("gpt-tiny-zero", "layout.zero.offload_param=cpu"),
            "layout.zero.offload_param",
            "layout.zero.offload_param=none",
        ),
        (("gpt-tiny", "layout.torch_compile=true"), "layout.torch_compile", "layout.torch_compile=false"),
        (("gpt-tiny", "--skew", "2"), "--skew", "2"),
        (("moe-tiny", "--skew", "0.5"), "--skew", "1"),
        (
            ("moe-tiny", "model.moe_token_dispatcher_type=allgather", "--skew", "2"),
            "--skew",
            "moe_token_dispatcher_type",
        ),
    ):
        assert cli.run(["dryrun", *arguments, *runs]) == 2
        require_message(capsys.readouterr().err, key, rule=rule)
    assert not list(tmp_path.iterdir())


def test_the_contract_of_json(small: dict[str, Report]) -> None:
    for report in small.values():
        found = RankReport.model_validate(report).contract()
        assert list(found) == [
            "recipe", "world_size", "rank", "stage", "memory_gib", "planned_gib", "collectives", "syncs_per_step",
            "save", "seconds",
        ]  # fmt: skip
        parts = ["weights", "gradients", "optimizer", "activations", "temporary", "total"]
        for memory in (found["memory_gib"], found["planned_gib"]):
            assert list(memory) == parts
            assert memory["total"] == pytest.approx(sum(memory[part] for part in parts[:-1]))
        assert all(set(each) == {"group", "op", "calls", "bytes"} for each in found["collectives"])
        assert set(found["save"]) == {"held_gib", "written_gib"}


def test_pictures_have_every_moment_and_pass(small: dict[str, Report]) -> None:
    first, last = (RankReport.model_validate(small[f"tensor, pipeline, rank {rank}"]) for rank in (0, 4))
    drawn = memory_svg(first, "rank < 1")
    assert drawn == memory_svg(first, "rank < 1")  # nothing random, no date
    memory = ElementTree.fromstring(drawn)  # noqa: S314 - our own text
    for part in PARTS:
        area = memory.find(f".//{{*}}g[@id='{part}']//{{*}}path")
        assert area is not None
        assert len(re.findall("[ML]", area.attrib["d"])) >= 2 * len(first.timeline)
    passes = ElementTree.fromstring(passes_svg([first, last], "passes"))  # noqa: S314 - our own text
    for report in (first, last):
        row = passes.find(f".//{{*}}g[@id='rank-{report.rank}']")
        assert row is not None
        assert len(row.findall("{*}path") + row.findall(".//{*}use")) == len(report.passes)


@pytest.mark.slow
def test_an_interrupted_command_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmrecipes.cli", "dryrun", "gpt-175b", "--cluster", "h100-ib"]
    with subprocess.Popen(
        [*command, "--json", "--runs-dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
        # A shell without job control ignores it in what it starts in the background, such as these tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as started:  # fmt: skip
        assert started.stderr is not None
        assert "gpt-175b" in started.stderr.readline()
        os.killpg(started.pid, signal.SIGINT)
        out, error = started.communicate()
    assert (started.returncode, out) == (130, "")
    assert "Traceback" not in error
    assert not list((tmp_path / "gpt-175b-dryrun").glob("*"))


@pytest.mark.slow
def test_the_command_runs_the_stages_of_a_world(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["dryrun", "gpt-tiny-3d", "--stages", "--runs-dir", str(tmp_path)]
    assert cli.run([*asked, "--json"]) == 0
    assert [report["stage"] for report in json.loads(capfd.readouterr().out)] == [0, 1]
    (folder,) = (tmp_path / "gpt-tiny-3d-dryrun").iterdir()
    assert {path.name for path in folder.iterdir()} == {
        "memory-0.svg", "memory-2.svg", "passes.svg", "rank-0.json", "rank-2.json",
    }  # fmt: skip
    assert cli.run(asked) == 0
    assert "stage 1" in capfd.readouterr().out


@pytest.mark.slow
def test_the_command_runs_a_stage_of_a_run_in_its_layout(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    of_long = '{"tensor_model_parallel_size": 2, "sequence_parallel": true}'
    stages = json.dumps([
        {"name": "s1", "train_iters": 10, "model": {"seq_length": 64}},
        {"name": "s2", "model": {"seq_length": 128}, "layout": json.loads(of_long)},
    ])  # fmt: skip
    asked = ["dryrun", "gpt-tiny", "search=null", f"stages={stages}", "--runs-dir", str(tmp_path), "--json"]
    groups = {}
    for name in ("s1", "s2"):
        assert cli.run([*asked, "--in", name]) == 0
        groups[name] = {each["group"] for each in json.loads(capfd.readouterr().out)["collectives"]}
    assert "tp" in groups["s2"] - groups["s1"]
    assert cli.run([*asked[:-1], "--in", "other"]) == 2
    require_message(capfd.readouterr().err, "--in", rule=("s1", "s2"))


def test_a_teacher_whose_states_are_compared_is_planned(process: GlooWorld) -> None:
    keys = ("distill.model={num_layers: 4}", "distill.layers=[[1, 2], [2, 4]]")
    (report,) = run(process, spec("gpt-tiny-minitron", *keys))
    assert sum(report["planned"].values()) == pytest.approx(sum(report["memory"].values()), rel=0.02)


def test_a_reference_is_in_the_dry_run_as_planned(process: GlooWorld) -> None:
    (report,) = run(process, spec("dpo-tiny"))
    assert sum(report["planned"].values()) == pytest.approx(sum(report["memory"].values()), rel=0.02)
