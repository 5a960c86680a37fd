"""Cluster profiles: their files, what planners make of them, and the environment of a rank."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrecipes.cli import app as cli
from llmrecipes.hardware import profile
from llmrecipes.hardware.cluster import Cluster, DetectedGpu, peak_tflops
from llmrecipes.hardware.load import clusters_dir, load_profile, names
from llmrecipes.hardware.machine import machine, planned
from llmrecipes.launch.environment import detected_environment, environment, missing, threads
from llmrecipes.plan.layout import layout
from llmrecipes.plan.run_plan import RunPlan, derive_run
from llmrecipes.recipe.load import load
from llmrecipes.train.spec import RunSpec
from llmrecipes.workflow.start import Machine, PreparedStart
from llmrecipes.workflow.train import _profile_of
from tests.helpers import tiny
from tests.refusals import refused, require_message

SHIPPED = [
    "a100-roce", "aks-nd-h100", "aws-p5-efa", "coreweave-h100", "ethernet", "gb200-nvl72", "gcp-a3", "gcp-a3-ultra",
    "h100-ib", "h200-ib", "laptop", "oci-h100", "rtx-4090",
]  # fmt: skip
GOOD = """\
name: mine
gpus_per_node: 2
gpu:
  name: NVIDIA H100 80GB HBM3
  memory_gib: 79.1
  peak_tflops: 989.4
cpu_cores: 8
memory_gib: 64
intra_node:
  kind: nvlink
  gb_per_s: 450
inter_node:
  kind: infiniband
  gb_per_s: 50
environment:
  NCCL_IB_TIMEOUT: 22
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text, "utf-8")
        return str(path)

    return write


def plan_on(cluster: str, nodes: int, recipe: str = "gpt-7b", *changes: str) -> RunPlan:
    found = machine(load_profile(cluster), nodes)
    return derive_run(load(recipe, list(changes)).recipe, len(found.gpus) or nodes, found)


def test_a_profile_with_thousands_of_problems_is_answered_in_few_lines(write: Callable[[str], str]) -> None:
    more = "".join(f"  bad-{i}: 1\n" for i in range(5_000)) + "".join(f"key_{i}: 1\n" for i in range(5_000))
    with refused("mine.yaml", rule=("10,000", "9,980")) as caught:
        load_profile(write(GOOD + more))
    assert len(str(caught.value).splitlines()) <= 62
    with refused("environment.NCCL_IB_TIMEOUT") as caught:
        load_profile(write(GOOD.replace("22", '"' + "x\\n" * 100_000 + '"')))
    assert len(str(caught.value)) < 2_000


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles(name: str) -> None:
    profile = load_profile(name)
    assert profile.description
    two = machine(profile, 2)
    assert len(two.gpus) == 2 * profile.gpus_per_node
    assert two.cpu_cores == 2 * profile.cpu_cores
    if profile.gpu:
        # The table that says what a GPU found here can do and the profile that says it from afar agree.
        assert peak_tflops(profile.gpu.name) == profile.gpu.peak_tflops
        assert profile.intra_node.gb_per_s > profile.inter_node.gb_per_s


@pytest.mark.parametrize("name", [name for name in SHIPPED if load_profile(name).gpu and name != "oci-h100"])
def test_shipped_prices_have_a_source_and_a_date(name: str) -> None:
    costs = load_profile(name).costs
    assert costs is not None and costs.usd_per_gpu_hour
    line = next(line for line in (clusters_dir() / f"{name}.yaml").read_text("utf-8").splitlines() if "costs:" in line)
    assert re.search(r"list price of .*, 20\d\d-\d\d-\d\d; set your own", line)


def test_every_key_is_read_somewhere() -> None:
    """A key of a profile that no code reads has no effect; the file of the schema itself does not count."""
    package = Path(profile.__file__).parents[1]
    read: set[str] = set()
    for path in package.rglob("*.py"):
        if path not in (Path(profile.__file__), Path(profile.__file__)):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    read.add(node.attr)
                elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                    read.add(str(node.slice.value))
    sections = (
        profile.Profile,
        profile.Gpu,
        profile.Link,
        profile.Adapters,
        profile.Slurm,
        profile.Kubernetes,
        profile.Toleration,
        profile.Volume,
        profile.ResourceClaim,
        profile.MeasuredLinks,
    )
    assert [
        f"{section.__name__}.{key}" for section in sections for key in section.model_fields if key not in read
    ] == []


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert names() == SHIPPED
    assert cli.run(["clusters"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == SHIPPED
    assert cli.run(["clusters", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["aws-p5-efa"]["kubernetes"]["rdma_count"] == 32


@pytest.mark.parametrize(
    ("change", "where", "rule"),
    [
        (("gpus_per_node: 2", "gpus_per_nod: 2"), ":2: gpus_per_nod", "gpus_per_node"),
        (("gpus_per_node: 2", "gpus_per_node: -1"), ":2: gpus_per_node", "-1"),
        (("gpus_per_node: 2", "gpus_per_node: 0"), ":2: gpus_per_node", ("0", "GPUs")),
        (
            ("  kind: infiniband", "  kind: carrier-pigeon"),
            ":13: inter_node.kind",
            ("'carrier-pigeon'", "inter_node.kind"),
        ),
        (("NCCL_IB_TIMEOUT: 22", "nccl: 22"), ":16: environment.nccl", ()),
        (("NCCL_IB_TIMEOUT: 22", "NCCL_IB_TIMEOUT: [1]"), ":16: environment.NCCL_IB_TIMEOUT", "[1]"),
        (("NCCL_IB_TIMEOUT: 22", "NCCL_IB_TIMEOUT: true"), ":16: environment.NCCL_IB_TIMEOUT", "true ("),
        (("NCCL_IB_TIMEOUT: 22", 'A: "1\\n#SBATCH"'), ":16: environment.A", "'1\\n#SBATCH'"),
        (("NCCL_IB_TIMEOUT: 22", "LD_PRELOAD: /x.so"), ":16: environment.LD_PRELOAD", ()),
        (("NCCL_IB_TIMEOUT: 22", "RANK: 1"), ":16: environment.RANK", ()),
        (("NCCL_IB_TIMEOUT: 22", "HF_TOKEN: hf_x"), ":16: environment.HF_TOKEN", ()),
        (("cpu_cores: 8", "cpu_cores: 8\nnvlink_domain: 3"), ":8: nvlink_domain", ("3", "gpus_per_node 2")),
        (("cpu_cores: 8", "cpu_cores: 8\nkubernetes: {rdma_count: 1}"), ": kubernetes.rdma_count", "rdma_resource"),
        (("cpu_cores: 8", "cpu_cores: 8\nslurm: {gres: '-x'}"), ": slurm.gres", "'-x'"),
        (("cpu_cores: 8", "cpu_cores: 8\nslurm: {mounts: [relative]}"), ": slurm.mounts.0", "'relative'"),
        (
            ("environment:", "adapters: {ports: 2, gb_per_s: 1}\nenvironment:"),
            ":15: adapters.ports",
            ("2 × 1", "inter_node.gb_per_s"),
        ),
        (
            ("environment:", "adapters: {ports: 2, gb_per_s: 50, names: [mlx5_0]}\nenvironment:"),
            "adapters.names",
            ("1", "2", "mlx5_0"),
        ),
        (
            ("environment:", "adapters: {ports: 2, gb_per_s: 50, names: ['^x', b]}\nenvironment:"),
            "adapters.names.0",
            (),
        ),
        (
            ("NCCL_IB_TIMEOUT: 22", "NCCL_IB_HCA: mlx5\nadapters: {ports: 2, gb_per_s: 50, names: [mlx5_0, mlx5_1]}"),
            "adapters.names",
            "NCCL_IB_HCA",
        ),
        (
            (
                "  kind: infiniband\n  gb_per_s: 50",
                "  kind: ethernet\n  gb_per_s: 50\nadapters: {ports: 2, gb_per_s: 50}",
            ),
            "adapters",
            "inter_node.kind",
        ),
        (("name: mine", "name: yours"), ":1: name", ("'yours'", "mine.yaml")),
    ],
)
def test_what_is_wrong_is_named(
    write: Callable[[str], str], change: tuple[str, str], where: str, rule: str | tuple[str, ...]
) -> None:
    with refused(where, rule=rule) as caught:
        load_profile(write(GOOD.replace(*change)))
    assert "mine.yaml:" in caught.value.where


@pytest.mark.parametrize("text", ["", "- a", "name: !!python/object/apply:os.system ['true']", "a: &x 1\nb: *x"])
def test_files_that_are_no_profile(write: Callable[[str], str], text: str) -> None:
    with refused("mine.yaml"):
        load_profile(write(text))


def test_a_good_file_and_an_unknown_name(write: Callable[[str], str]) -> None:
    assert load_profile(write(GOOD)).environment == {"NCCL_IB_TIMEOUT": 22}
    with refused("h100", rule="h100-ib"):
        load_profile("h100")
    with refused("--nodes", rule="--cluster"):
        planned(None, 2, 1)


def test_the_planner_plans_for_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "gpt-7b", "--details", "--cluster", "h200-ib", "--nodes", "3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["cluster"]["nodes"] == 3
    assert shown["plan"]["device"] == "cuda"
    assert shown["plan"]["memory_capacity_bytes"] == int(139.8 * 2**30)
    assert cli.run(["plan", "gpt-7b", "--details", "--cluster", "h200-ib"]) == 0
    assert "Plan on 1 node of h200-ib: 8 × NVIDIA H200" in capsys.readouterr().out
    assert cli.run(["plan", "gpt-7b", "--placement", "--cluster", "nowhere"]) == 2


def test_tensor_parallelism_stays_in_a_node_or_in_an_nvlink_domain() -> None:
    recipe = load("gpt-7b", ["layout.tensor_model_parallel_size=8"]).recipe
    with refused("layout.tensor_model_parallel_size", rule=("8", "4")):
        layout(recipe, 8, machine(load_profile("ethernet"), 2))
    assert layout(recipe, 8, machine(load_profile("gb200-nvl72"), 2)).tensor_model_parallel_size == 8


def test_adapters_are_passed_to_nccl_by_their_whole_names(write: Callable[[str], str]) -> None:
    """A prefix such as mlx5 matches storage adapters too."""
    for name in SHIPPED:
        assert not str(load_profile(name).environment.get("NCCL_IB_HCA", "=")).startswith("mlx5")
    named = GOOD.replace(
        "environment:", "adapters: {ports: 2, gb_per_s: 50, names: [mlx5_0, 'mlx5_3:1']}\nenvironment:"
    )
    found = environment(load_profile(write(named)), plan_on("h100-ib", 2), 8)
    assert found["NCCL_IB_HCA"] == "=mlx5_0,mlx5_3:1"
    assert "NCCL_IB_HCA" not in environment(load_profile(write(GOOD)), plan_on("h100-ib", 2), 8)


@pytest.mark.parametrize("name", ["a100-roce", "h100-ib", "h200-ib"])
def test_ucx_reaches_the_own_process_its_node_and_gpu_memory_too(name: str) -> None:
    transports = str(load_profile(name).environment["UCX_TLS"]).split(",")
    assert {"self", "sm", "rc", "cuda_copy"} <= set(transports)


def test_environment_comes_from_profile_and_plan() -> None:
    found = environment(load_profile("h100-ib"), plan_on("h100-ib", 2), 8, Path("/runs/logs"))
    assert found["NCCL_IB_TIMEOUT"] == "22"
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"  # gpt-7b is tensor-parallel
    assert found["OMP_NUM_THREADS"] == "14"
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == "/runs/logs/collectives-rank-"
    dense = environment(load_profile("h100-ib"), plan_on("h100-ib", 1, "gpt-125m"), 8)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in dense
    blackwell = environment(load_profile("gb200-nvl72"), plan_on("gb200-nvl72", 2), 4)
    assert blackwell["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"  # the profile knows better
    laptop = machine(load_profile("laptop"), 1)
    assert environment(load_profile("laptop"), derive_run(tiny(), 2, laptop), 2) == {"OMP_NUM_THREADS": "2"}
    assert missing({"A": "1", "B": "2"}, {"A": "0"}) == {"B": "2"}
    assert missing({"PYTORCH_ALLOC_CONF": "ours"}, {"PYTORCH_CUDA_ALLOC_CONF": "the user's"}) == {}


def test_detected_gpus_get_the_environment_that_needs_no_site() -> None:
    def node(name: str) -> Cluster:
        return Cluster((DetectedGpu(name, 79 << 30, 79 << 30, None),) * 8, 112, 1 << 40, 1 << 40, 0)

    hopper = node("NVIDIA H100 80GB HBM3")
    plan = derive_run(load("gpt-7b", []).recipe, 8, hopper)  # tensor-parallel
    found = detected_environment(hopper, plan, Path("/runs/logs"))
    of_a_site = environment(load_profile("h100-ib"), plan, 8, Path("/runs/logs"))
    assert {name: of_a_site[name] for name in found} == found
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == "/runs/logs/collectives-rank-"
    assert {"PYTORCH_ALLOC_CONF", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "NCCL_DEBUG"} < found.keys()
    assert detected_environment(node("NVIDIA B200"), plan)["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert detected_environment(machine(load_profile("laptop"), 1), plan) == {}
    assert [threads(112, 4, on_gpus=True), threads(112, 4, on_gpus=False), threads(2, 4, on_gpus=True)] == [16, 28, 1]


def test_training_here_as_a_node_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", "gpt-tiny", "--cluster", "h100-ib"]) == 2
    require_message(capsys.readouterr().err, "--cluster", rule=("h100-ib", "8", "0"))
    profile = tmp_path / "small.yaml"
    profile.write_text((clusters_dir() / "laptop.yaml").read_text().replace("laptop", "small").replace(": 16", ": 0.1"))
    assert cli.run(["train", "gpt-tiny", "--cluster", str(profile)]) == 2
    printed = capsys.readouterr().err
    require_message(printed, "recipe gpt-tiny", rule="GiB")
    assert " small " in printed
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
    profile.write_text(
        (clusters_dir() / "laptop.yaml").read_text().replace("laptop", "small") + "environment: {A: 1}\n"
    )
    here, recipe = machine(load_profile("laptop"), 1), tiny()
    site = Machine(here, 1, profile=_profile_of(str(profile), recipe, 1, here, 1))
    spec = RunSpec(recipe=recipe, data_dir=tmp_path, run_dir=tmp_path / "r", runs_dir=tmp_path)
    variables = PreparedStart.of(spec, derive_run(recipe, 1, here), site).variables
    assert missing(variables, {"OMP_NUM_THREADS": "1"}) == {"A": "1"}
