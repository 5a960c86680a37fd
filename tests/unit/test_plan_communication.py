"""Time of a step's collectives: by measured bandwidths where there are any, else by the links of the profile."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from benchmarks.former import ADAMW
from llmrecipes.cli.app import run
from llmrecipes.hardware.load import clusters_dir, load_profile
from llmrecipes.hardware.profile import LINK_BYTES, MeasuredLinks, Profile
from llmrecipes.plan.communication import Communication, Members, communication, members, time_of
from llmrecipes.plan.derive import Plan
from llmrecipes.plan.traffic import Call, calls, counted
from llmrecipes.workflow.bench import write_profile
from tests.refusals import require_message
from tests.unit.test_clusters import plan_on

MIB = 1 << 20
GRADIENTS = Members("data", 16, 1, 120)
TENSOR = Members("tensor", 8, 8, 7)
WIDE_EXPERTS = (
    "layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true",
    "layout.expert_model_parallel_size=64", "layout.virtual_pipeline_model_parallel_size=null",
    "layout.pipeline_model_parallel_layout=null", "layout.num_layers_in_first_pipeline_stage=4",
    "layout.num_layers_in_last_pipeline_stage=1",
)  # fmt: skip


def planned(cluster: str, nodes: int, recipe: str = "gpt-7b", *changes: str) -> Plan:
    return plan_on(cluster, nodes, recipe, *changes).largest


def row(operation: str, group: str, ranks: int, size: int, speed: float, here: int | None) -> MeasuredLinks:
    values = {"operation": operation, "group": group, "ranks": ranks, "bytes": size, "seconds": 1.0}
    return MeasuredLinks.model_validate({**values, "bus_gb_per_s": speed, "ranks_per_node": here})


def with_rows(*rows: MeasuredLinks, cluster: str = "h100-ib") -> Profile:
    return load_profile(cluster).model_copy(update={"measured": rows})


@pytest.mark.parametrize(
    ("recipe", "changes", "nodes"),
    [
        ("gpt-175b", (), 4),
        ("llama3-405b", (), 64),
        ("deepseek-v3", (), 128),
        ("gpt-1b", ("layout=zero3",), 1),
    ],
)
def test_every_call_of_a_step_has_a_group(recipe: str, changes: tuple[str, ...], nodes: int) -> None:
    plan = planned("h100-ib", nodes, recipe, *changes)
    for stage in {0, plan.layout.pipeline_model_parallel_size - 1}:
        merged: Counter[Call] = Counter()
        for (_, call), number in counted(plan, stage).items():
            merged[call] += number
        assert merged == Counter(calls(plan, stage))


@pytest.mark.parametrize(
    ("engine", "stage", "sent"),
    [("megatron", 0, 2), ("megatron", 1, 1.5), ("deepspeed", 1, 2.5), ("deepspeed", 2, 1.5), ("deepspeed", 3, 2)],
)
def test_a_step_of_the_default_types_sends_what_the_documentation_says(engine: str, stage: int, sent: float) -> None:
    """In sizes of the model's fp32 gradients; weights are bf16. docs/reference/zero.md has the table."""
    sharded = f"layout.use_distributed_optimizer={str(stage > 0).lower()}"
    changes = (
        f"layout.engine={engine}",
        f"layout.zero.stage={stage}",
        sharded,
        "train.precision=bf16",
        "train.global_batch_size=64",
    )
    plan = planned("h100-ib", 1, "gpt-tiny", *ADAMW, *changes)
    assert plan.num_microbatches == 1
    share = (plan.layout.data_parallel_size - 1) / plan.layout.data_parallel_size
    volume = sum(call.volume for call in calls(plan, 0))
    assert volume == pytest.approx(sent * 4 * plan.num_parameters_on_rank * share)


@pytest.mark.parametrize(
    ("changes", "times", "width"),
    [
        (("layout.engine=megatron",), 1, 4),
        (("layout.engine=deepspeed", "layout.zero.stage=1"), 4, 2),
        (("layout.engine=deepspeed", "layout.zero.stage=3"), 4, 2),
    ],
)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_of_what_tensor_ranks_share_are_summed_as_often_as_by_the_engine(
    changes: tuple[str, ...], times: int, width: int, sequence_parallel: bool
) -> None:
    """Once a step and in fp32 by megatron-core; before ZeRO reduces them, in each micro-batch, with DeepSpeed."""
    shape = ("layout.tensor_model_parallel_size=2", "train.global_batch_size=16", "layout.micro_batch_size=1")
    kept = (f"layout.sequence_parallel={str(sequence_parallel).lower()}", "train.precision=bf16")
    plan = planned("h100-ib", 1, "gpt-tiny", *ADAMW, *shape, *kept, *changes)
    assert plan.num_microbatches == 4 and plan.recipe.model.qk_layernorm
    model = plan.recipe.model
    heads = 2 * model.hidden_size // model.num_attention_heads  # norms of queries and keys, as wide as a head
    whole = model.num_layers * heads
    if sequence_parallel:
        whole += (2 * model.num_layers + 1) * model.hidden_size
    assert counted(plan, 0)["tensor", Call("all-reduce", 2, width * whole)] == times


def test_groups_are_where_megatron_puts_their_ranks() -> None:
    layout = planned("h100-ib", 256, "deepseek-v3", *WIDE_EXPERTS).layout
    data, stages = members("data", 64, layout, 8), members("pipeline", 16, layout, 8)
    assert (data.ranks_per_node, data.reach) == (4, 126)
    assert (stages.ranks_per_node, stages.reach) == (1, 15 * 128)
    experts, replicas = members("expert", 64, layout, 8), members("expert_data", 2, layout, 8)
    assert (experts.ranks_per_node, experts.reach) == (8, 63)
    assert (replicas.ranks_per_node, replicas.reach) == (1, 64)
    plan = planned("h100-ib", 4)  # tensor 2 × data 16
    assert members("tensor", 2, plan.layout, 8).on_one_node
    assert members("data", 16, plan.layout, 8).ranks_per_node == 4


def test_links_of_the_profile_count_where_nothing_was_measured() -> None:
    profile = load_profile("h100-ib")
    call = Call("all-reduce", 16, 1000 * MIB)
    seconds, source = time_of(call, GRADIENTS, profile)
    assert source == "inter_node" and seconds == pytest.approx(2 * 15 / 16 * 1000 * MIB / 50e9)
    assert time_of(Call("all-gather", 8, MIB), TENSOR, profile)[1] == "intra_node"
    domain = load_profile("gb200-nvl72")
    assert time_of(call, Members("data", 16, 4, 15), domain)[1] == "intra_node"  # NVLink between nodes


def test_a_measured_row_replaces_the_link() -> None:
    rows = [row("all_reduce", "data", 16, size, speed, 1) for size, speed in ((MIB, 2.0), (LINK_BYTES, 20.0))]
    profile = with_rows(*rows)

    def seconds(size: int) -> float:
        found, source = time_of(Call("all-reduce", 16, size), GRADIENTS, profile)
        assert source == "measured"
        return found

    small, large = (2 * 15 / 16 * size / speed for size, speed in ((MIB, 2e9), (LINK_BYTES, 20e9)))
    assert seconds(MIB) == pytest.approx(small)
    assert seconds(1024) == pytest.approx(small)  # latency: a smaller buffer is not quicker
    assert seconds((MIB + LINK_BYTES) // 2) == pytest.approx((small + large) / 2)
    assert seconds(4 * LINK_BYTES) == pytest.approx(4 * large)  # a link's bandwidth holds for all larger ones
    latency = with_rows(rows[0])
    for size, source in ((2 * MIB, "measured"), (2 * MIB + 16, "inter_node")):
        assert time_of(Call("all-reduce", 16, size), GRADIENTS, latency)[1] == source


@pytest.mark.parametrize(
    ("measured", "group", "source"),
    [
        (row("all_reduce", "data", 8, LINK_BYTES, 9, 1), GRADIENTS, "measured"),  # half as many ranks
        (row("all_reduce", "world", 32, LINK_BYTES, 9, 1), GRADIENTS, "measured"),  # another name, the same places
        (row("all_reduce", "data", 4, LINK_BYTES, 9, 1), GRADIENTS, "inter_node"),
        (row("all_reduce", "data", 64, LINK_BYTES, 9, 1), GRADIENTS, "inter_node"),
        (row("all_reduce", "data", 16, LINK_BYTES, 9, 8), GRADIENTS, "inter_node"),  # shares adapters otherwise
        (row("all_reduce", "data", 8, LINK_BYTES, 9, 8), GRADIENTS, "inter_node"),  # inside a node
        (row("all_gather", "data", 16, LINK_BYTES, 9, 1), GRADIENTS, "inter_node"),
        (row("all_reduce", "data", 16, LINK_BYTES, 9, None), GRADIENTS, "measured"),  # of an older version
        (row("all_reduce", "world", 16, LINK_BYTES, 9, None), GRADIENTS, "inter_node"),
        (row("all_reduce", "tensor", 4, LINK_BYTES, 9, 4), TENSOR, "measured"),
        (row("all_reduce", "tensor", 8, LINK_BYTES, 9, 4), TENSOR, "intra_node"),
    ],
)
def test_which_rows_count(measured: MeasuredLinks, group: Members, source: str) -> None:
    assert time_of(Call("all-reduce", group.ranks, LINK_BYTES), group, with_rows(measured))[1] == source


def test_the_nearest_row_counts() -> None:
    found = [
        row("all_reduce", "data", 8, LINK_BYTES, 1, 1),
        row("all_reduce", "world", 16, LINK_BYTES, 2, 1),
        row("all_reduce", "data", 16, LINK_BYTES, 3, None),
        row("all_reduce", "data", 16, LINK_BYTES, 4, 1),
    ]
    for left, speed in ((4, 4), (3, 3), (2, 2), (1, 1)):
        seconds, _ = time_of(Call("all-reduce", 16, LINK_BYTES), GRADIENTS, with_rows(*found[:left]))
        assert 2 * 15 / 16 * LINK_BYTES / seconds == pytest.approx(speed * 1e9)


def seconds_of(found: Communication, group: str, source: str) -> float:
    return sum(part.seconds for part in found.parts if part.group == group and part.source == source)


def test_the_plan_is_slower_by_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned("h100-ib", 4)
    before = communication(plan, load_profile("h100-ib"), 8)
    rows = [row(each, "data", 16, LINK_BYTES, 25, 4) for each in ("all_reduce", "all_gather", "reduce_scatter")]
    after = communication(plan, with_rows(*rows), 8)
    assert seconds_of(before, "data", "inter_node") > 0
    assert seconds_of(after, "data", "measured") == pytest.approx(2 * seconds_of(before, "data", "inter_node"))
    assert seconds_of(after, "tensor", "intra_node") == pytest.approx(seconds_of(before, "tensor", "intra_node"))
    # By the commands: what bench writes, plan reads.
    monkeypatch.chdir(tmp_path)
    write_profile("h100-ib", rows[:1], Path("mine.yaml"))
    write_profile("mine.yaml", rows[1:], Path("mine.yaml"))  # rows of before stay
    assert run(["plan", "gpt-7b", "--details", "--cluster", "mine.yaml", "--nodes", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["communication"]
    assert shown["seconds"] == pytest.approx(after.seconds)
    assert {part["source"] for part in shown["parts"] if part["group"] == "data"} == {"measured"}
    assert run(["plan", "gpt-7b", "--details", "--cluster", "mine.yaml", "--nodes", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("data: " in line and "measured" in line for line in lines)
    assert any("tensor: " in line and "profile, intra_node" in line for line in lines)
    assert run(["plan", "gpt-tiny", "--details", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["communication"] is None


GOOD = {"operation": "all_reduce", "group": "data", "ranks": 8, "bytes": MIB, "seconds": 0.1, "bus_gb_per_s": 1.0}


@pytest.mark.parametrize(
    ("rows", "key"),
    [
        ([{**GOOD, "bus_gb_per_s": -1.0}], "measured.0.bus_gb_per_s"),
        ([{**GOOD, "bus_gb_per_s": 0}], "measured.0.bus_gb_per_s"),
        ([{**GOOD, "bus_gb_per_s": float("nan")}], "measured.0.bus_gb_per_s"),
        ([{**GOOD, "seconds": float("inf")}], "measured.0.seconds"),
        ([{**GOOD, "operation": "all_refuse"}], "measured.0.operation"),
        ([{**GOOD, "group": "everybody"}], "measured.0.group"),
        ([{**GOOD, "ranks": 0}], "measured.0.ranks"),
        ([{**GOOD, "bytes": 1.5}], "measured.0.bytes"),
        ([{**GOOD, "ranks_per_node": 9}], "measured.0.ranks_per_node"),
        ([{**GOOD, "speed": 1}], "measured.0.speed"),
        ([{key: GOOD[key] for key in GOOD if key != "seconds"}], "measured.0.seconds"),
        ([GOOD, {**GOOD, "bus_gb_per_s": 2.0}], "measured.1"),
    ],
)
def test_bad_rows_are_refused(
    rows: list[dict[str, object]], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = yaml.safe_load((clusters_dir() / "h100-ib.yaml").read_text("utf-8"))
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**data, "name": "mine", "measured": rows}), "utf-8")
    assert run(["plan", "gpt-7b", "--details", "--cluster", str(path), "--nodes", "4"]) == 2
    require_message(capsys.readouterr().err, key)
