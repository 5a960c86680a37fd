"""A checkpoint of Megatron-LM becomes a run with the same weights, and what is no such checkpoint is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.cli.app import run
from llmrecipes.engine.base import Progress
from llmrecipes.engine.core.megatron_lm_checkpoint import open_saved
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.world import join
from llmrecipes.engine.megatron.backend import MegatronBackend
from llmrecipes.models.importing import import_megatron
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load
from llmrecipes.recipe.rules.megatron_lm import BY_ARGUMENT, BY_SHAPE, FIXED, check, notes
from llmrecipes.recipe.schema import TRAINING_ONLY, Model, Recipe
from tests import megatron_lm
from tests.helpers import ROOMY, another, close_engines, engine_of, steps, tiny, write_recipe
from tests.refusals import refused, require_message

LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "activation_func": "silu",
    "gated_linear_unit": True, "ffn_hidden_size": 96, "add_bias_linear": False, "num_query_groups": 2,
    "share_embeddings_and_output_weights": False, "vocab_size": 500,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "experts": {**LLAMA, "num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_layer_freq": [0, 1]},
    "latent": {
        **LLAMA, "num_query_groups": None, "multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16, "qk_layernorm": True,
    },
    "prediction": {**LLAMA, "mtp_num_layers": 1},
}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """What was saved."""

    recipe: Recipe
    folder: Path
    """With the tracker."""
    path: Path
    """Of the iteration."""
    weights: dict[str, torch.Tensor]
    logits: torch.Tensor


def logits_of(module: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(64)[None] % 97
    mask = torch.ones_like(ids).float()
    with torch.no_grad():  # with layers that predict further, only losses
        found: torch.Tensor = module.eval()(
            ids, ids, None, **({"labels": ids, "loss_mask": mask} if module.mtp_process else {})
        )
    return found


def training(name: str, folder: Path, *, by_itself: bool = False, **changes: Any) -> Training:
    """Two steps, saved as Megatron-LM does, or by itself."""
    recipe = tiny("of-megatron", model=MODELS[name], **changes)
    platform = select()
    platform.install()
    with join(platform, recipe.train.seed, recipe.layout):
        engine = engine_of(recipe)
        steps(engine, 2)
        if by_itself:
            path = megatron_lm.save_by_training(engine, folder)
        else:
            path = megatron_lm.save(engine, folder, megatron_lm.arguments(recipe))
        weights = {key: value.detach().clone() for key, value in engine.modules[0].named_parameters()}
        logits = logits_of(engine.modules[0])
        close_engines()
    return Training(recipe, folder, path, weights, logits)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return training("llama", tmp_path_factory.mktemp("megatron"))


def require_same(found: Training, run_dir: Path) -> None:
    """The run's checkpoint has the weights bit for bit, as master weights too, and a training that has not begun."""
    (entry,) = CheckpointStore(run_dir / "checkpoints").entries()
    recipe = load(str(run_dir / "recipe.yaml")).recipe
    platform = select()
    with join(platform, recipe.train.seed, recipe.layout):
        model = MegatronBackend().load_weights(derive(recipe, 1, ROOMY), platform, entry)
        for name, value in model._built.module.named_parameters():
            # Rows of the vocabulary's padding that the checkpoint does not have are zero.
            assert torch.equal(value[: len(found.weights[name])], found.weights[name][: len(value)]), name
        tokens = recipe.model.vocab_size
        assert torch.equal(logits_of(model._built.module)[..., :tokens], found.logits[..., :tokens])
        engine = engine_of(recipe)
        assert engine.load_state(entry) == Progress()
        assert [result.skipped for result in steps(engine, 1)] == [False]
        close_engines()


@pytest.mark.parametrize(
    "name", ["gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("experts", "latent", "prediction"))]
)
def test_every_weight_arrives(name: str, tmp_path: Path) -> None:
    found = training(name, tmp_path / "megatron")
    made = import_megatron(found.folder, write_recipe(found.recipe, tmp_path), [], tmp_path / "runs", "first")
    assert (made.origin["iteration"], made.origin["source"]) == (megatron_lm.ITERATION, str(found.path))
    require_same(found, Path(made.run_dir))


if megatron_lm.TRAINS:

    def test_what_the_training_of_megatron_lm_saves_arrives(tmp_path: Path) -> None:
        """With its 800 arguments, random states and optimizer."""
        found = training("llama", tmp_path / "megatron", by_itself=True)
        assert len(open_saved(found.path).arguments) > 500
        made = import_megatron(found.folder, write_recipe(found.recipe, tmp_path), [], tmp_path / "runs", "first")
        assert made.origin["iteration"] == megatron_lm.ITERATION
        require_same(found, Path(made.run_dir))


@pytest.mark.parametrize("rows", [128, 1000])
def test_the_command_makes_a_run_with_another_padding(
    rows: int, saved: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["import", str(saved.path), "--from", "megatron", "--recipe", write_recipe(saved.recipe, tmp_path)]
    command += [f"model.make_vocab_size_divisible_by={rows}", "--run-id", "made", "--runs-dir", str(tmp_path / "runs")]
    assert run([*command, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    run_dir = tmp_path / "runs" / "of-megatron" / "made"
    assert made["run_dir"] == str(run_dir)
    assert made["parameters"] > sum(value.numel() for value in saved.weights.values()) * (rows == 1000)
    require_same(saved, run_dir)
    assert run(command) == 2
    require_message(capsys.readouterr().err, run_dir)


def test_weights_of_another_precision_are_converted(saved: Training, tmp_path: Path) -> None:
    recipe = write_recipe(saved.recipe, tmp_path)
    made = import_megatron(saved.path, recipe, ["train.precision=bf16"], tmp_path / "runs", "half")
    assert any("bf16" in note for note in made.origin["notes"])
    (entry,) = CheckpointStore(Path(made.run_dir) / "checkpoints").entries()
    with join(select(), 1, saved.recipe.layout):
        half = load(str(Path(made.run_dir) / "recipe.yaml")).recipe
        model = MegatronBackend().load_weights(derive(half, 1, ROOMY), select(), entry)
        for name, value in model._built.module.named_parameters():
            assert torch.equal(value, saved.weights[name].bfloat16()), name


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_arguments_are_read_as_plain_values(saved: Training) -> None:
    found = open_saved(saved.path).arguments
    assert found == {
        name: value
        for name, value in vars(megatron_lm.arguments(saved.recipe)).items()
        if name not in ("params_dtype", "attention_backend", "exit_signal", "save")
    }
    assert list(check(found, saved.recipe)) == []


@pytest.mark.parametrize(
    ("key", "changes", "override"),
    [
        ("model.num_layers", {"num_layers": 4}, "model.num_layers=4"),
        ("model.num_attention_heads", {"num_attention_heads": 8}, "model.num_attention_heads=8"),
        ("model.ffn_hidden_size", {"ffn_hidden_size": 256}, "model.ffn_hidden_size=256"),
        ("model.num_query_groups", {"num_query_groups": 4}, "model.num_query_groups=4"),
        ("model.num_query_groups", {"group_query_attention": False}, "model.num_query_groups=4"),
        ("model.rotary_base", {"rotary_base": 500000}, "model.rotary_base=500000"),
        ("model.position_embedding_type", {"position_embedding_type": "yarn"}, ""),
        ("model.rope_scaling", {"use_rope_scaling": True}, "model.rope_scaling=true"),
        ("model.layernorm_epsilon", {"norm_epsilon": 1e-6}, "model.layernorm_epsilon=1e-06"),
        ("model.layernorm_epsilon", {"layernorm_epsilon": 1e-6}, "model.layernorm_epsilon=1e-06"),
        ("model.activation_func", {"swiglu": False}, "model.activation_func=gelu"),
        ("model.add_qkv_bias", {"add_qkv_bias": True}, "model.add_qkv_bias=true"),
        ("model.share_embeddings_and_output_weights", {"untie_embeddings_and_output_weights": False}, ""),
        ("model.num_moe_experts", {"num_experts": 8}, "model.num_moe_experts=8"),
        ("model.vocab_size", {"vocab_size": 505}, "model.vocab_size=505"),
        ("model.vocab_size", {"padded_vocab_size": 256}, ""),
        ("openai_gelu", {"openai_gelu": True}, ""),
        ("model.window_size", {"window_size": [128, 0]}, "model.window_size=[128, 0]"),
    ],
)
def test_another_model_is_refused_by_its_key(key: str, changes: dict[str, Any], override: str, saved: Training) -> None:
    found = vars(megatron_lm.arguments(saved.recipe, **changes))
    problems = {problem.key: problem for problem in check(found, saved.recipe)}
    assert key in problems
    value = next(iter(changes.values()))
    assert override in problems[key].fix
    if override and not isinstance(value, bool):
        assert str(value) in problems[key].what


def test_windows_are_compared_layer_by_layer() -> None:
    recipe = tiny(model={**LLAMA, "window_size": [3, 0], "window_attn_skip_freq": [1, 0]})
    for same in ({}, {"window_attn_skip_freq": 2}):
        assert not list(check(vars(megatron_lm.arguments(recipe, **same)), recipe))
    for other in ({"window_attn_skip_freq": None}, {"window_attn_skip_freq": 3}):
        (problem,) = check(vars(megatron_lm.arguments(recipe, **other)), recipe)
        assert problem.key == "model.window_attn_skip_freq"
    (problem,) = check(vars(megatron_lm.arguments(recipe, window_size=(4, 0))), recipe)
    assert problem.key == "model.window_size"


def test_experts_are_compared_layer_by_layer() -> None:
    recipe = tiny(model={**LLAMA, "num_moe_experts": 4, "moe_layer_freq": [1, 0]})
    assert not list(check(vars(megatron_lm.arguments(recipe, moe_layer_freq=2)), recipe))
    (problem,) = check(vars(megatron_lm.arguments(recipe, moe_layer_freq=1)), recipe)
    assert problem.key == "model.moe_layer_freq"


def test_every_key_of_the_model_has_an_account() -> None:
    accounts = {"compared": BY_ARGUMENT, "shown by the weights": BY_SHAPE, "of the training only": TRAINING_ONLY}
    wrong = [
        f"megatron_lm: model.{key} has {len(names)} accounts, {names}: see 'A recipe key' in CONTRIBUTING.md"
        for key in sorted({*Model.model_fields, *frozenset().union(*accounts.values())})
        if len(names := [name for name, keys in accounts.items() if key in keys]) != 1 or key not in Model.model_fields
    ]
    assert not wrong, "\n".join(wrong)
    assert not FIXED.keys() & Model.model_fields, "a key of the recipe is compared, not fixed"


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_another_value_is_refused_unless_the_weights_show_it(name: str) -> None:
    """Also where no argument says it, as in a checkpoint of a version without the key."""
    recipe = tiny(model={**MODELS[name], "rope_scaling": True})
    found = vars(megatron_lm.arguments(recipe, use_rope_scaling=True))
    assert not list(check(found, recipe))
    for key in Model.model_fields:
        model = recipe.model.model_copy(update={key: another(recipe.model, key)})
        problems = {each.key for each in check(found, recipe.model_copy(update={"model": model}))}
        if key in BY_ARGUMENT and (name == "experts" or not key.startswith("moe_")):
            assert f"model.{key}" in problems, key
        elif key in TRAINING_ONLY:
            assert not problems, key


def test_a_key_without_an_account_is_imported_with_its_default_only() -> None:
    class Interleaved(Model):
        new_key: bool = False

    recipe = tiny(model=LLAMA)
    found = vars(megatron_lm.arguments(recipe))
    for value, refused_keys in ((False, []), (True, ["model.new_key"])):
        model = Interleaved.model_validate({**recipe.model.model_dump(), "new_key": value})
        assert [each.key for each in check(found, recipe.model_copy(update={"model": model}))] == refused_keys


def test_gelu_is_the_approximation_where_the_kernel_adds_the_bias() -> None:
    recipe = tiny(model={"activation_func": "gelu_tanh"})
    assert not list(check(vars(megatron_lm.arguments(recipe, bias_gelu_fusion=True)), recipe))
    assert [each.key for each in check(vars(megatron_lm.arguments(recipe)), recipe)] == ["model.activation_func"]


def test_yarn_of_latent_attention_is_compared_with_megatron_core_s_defaults() -> None:
    latent = {
        **LLAMA, "num_query_groups": None, "multi_latent_attention": True, "rope_type": "yarn",
        "rotary_scaling_factor": 4.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    recipe = tiny(model=latent)
    # Without --rope-type it is YaRN.
    same = {"rope_type": None, "rotary_scaling_factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert not list(check(vars(megatron_lm.arguments(recipe, **same)), recipe))
    for key, value in (("rope_type", "rope"), ("mscale_all_dim", 0.0), ("original_max_position_embeddings", 64)):
        problems = {each.key for each in check(vars(megatron_lm.arguments(recipe, **{**same, key: value})), recipe)}
        assert f"model.{key}" in problems, key


def test_what_is_not_refused_is_said() -> None:
    recipe = tiny(data={"tokenizer": {"type": "huggingface", "path": "folder"}})
    assert len(list(notes({}, recipe))) == 1
    (note,) = notes(vars(megatron_lm.arguments(recipe, bias_gelu_fusion=True)), recipe)
    assert "bias_gelu_fusion" in note
    assert not list(notes(vars(megatron_lm.arguments(recipe)), recipe))
    (note,) = notes(vars(megatron_lm.arguments(tiny())), tiny())
    assert "data.tokenizer.type" in note


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(saved: Training, tmp_path: Path) -> Path:
    """The folder of the iteration, to be damaged."""
    shutil.copytree(saved.folder, tmp_path / "copy")
    return tmp_path / "copy" / saved.path.name


def require_refused(
    saved: Training, source: Path, where: Path, *overrides: str, rule: str | tuple[str, ...] = ()
) -> None:
    runs = source.parent / "runs"
    with refused(where, rule=rule):
        import_megatron(source, write_recipe(saved.recipe, source.parent), overrides, runs, "never")
    assert not list(runs.glob("*/*"))


def largest(path: Path) -> Path:
    return max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)


def alter_index(path: Path, change: Callable[[Any], None]) -> None:
    index = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301 - our own
    change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def replace_common(path: Path, content: bytes) -> Path:
    """What is not sharded: a file of its own before megatron-core 0.19. Returns the file."""
    if (path / "common.pt").exists():
        (path / "common.pt").write_bytes(content)
        return path / "common.pt"
    (path / "__9_0.distcp").write_bytes(content)

    def change(index: Any) -> None:
        (key,) = (key for key in index.storage_data if key.fqn == "common_state/shard_0_1")
        index.storage_data[key] = replace(
            index.storage_data[key], relative_path="__9_0.distcp", offset=0, length=len(content)
        )

    alter_index(path, change)
    return path / "__9_0.distcp"


def as_torch_saves(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


def test_a_recipe_of_other_sizes_is_refused_by_its_weights(saved: Training, copy: Path) -> None:
    """The arguments are missing: a checkpoint of another program."""
    replace_common(copy, as_torch_saves({"iteration": 7}))
    assert (open_saved(copy).arguments, open_saved(copy).iteration) == ({}, 7)
    first = "decoder.layers.0."
    require_refused(saved, copy, copy, "model.ffn_hidden_size=128", rule=f"{first}mlp.linear_fc1.weight")
    require_refused(saved, copy, copy, "model.num_layers=3", rule="decoder.layers.2.mlp.linear_fc1.weight")
    require_refused(saved, copy, copy, "model.vocab_size=600", rule=("output_layer.weight", "600"))
    require_refused(saved, copy, copy, "model.add_qkv_bias=true", rule=f"{first}self_attention.linear_qkv.bias")


def test_a_recipe_that_the_arguments_contradict_is_refused(
    saved: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["import", str(saved.folder), "--from", "megatron", "--recipe", write_recipe(saved.recipe, tmp_path)]
    command += ["--runs-dir", str(tmp_path / "runs")]
    assert run([*command, "model.rotary_base=500000"]) == 2
    require_message(capsys.readouterr().err, "model.rotary_base", rule=("500000.0", "10000"))
    assert run([*command, "model.num_layers=3", "model.hidden_size=128"]) == 2
    told = capsys.readouterr().err
    assert "model.num_layers" in told and "model.hidden_size" in told
    assert run(command[:4]) == 2
    require_message(capsys.readouterr().err, "--recipe")
    assert run(["import", str(saved.folder), "--from", "nemo"]) == 2
    require_message(capsys.readouterr().err, "--from")
    assert not (tmp_path / "runs").exists()


def test_nothing_in_it_is_run(saved: Training, copy: Path) -> None:
    marker = copy.parent / "pwned"
    file = replace_common(copy, as_torch_saves({"args": Bomb(marker)}))
    require_refused(saved, copy, file, rule="posix.system")
    (copy / ".metadata").write_bytes(pickle.dumps(Bomb(marker)))
    require_refused(saved, copy, copy / ".metadata", rule="posix.system")
    shutil.copyfile(saved.path / ".metadata", copy / ".metadata")
    data = copy / largest(copy).name
    data.write_bytes(as_torch_saves(Bomb(marker)).ljust(data.stat().st_size, b"\0"))
    if (copy / "common.pt").exists():  # else what is not sharded was in that file too
        shutil.copyfile(saved.path / "common.pt", copy / "common.pt")
    require_refused(saved, copy, data)
    assert not marker.exists()


def test_a_compressed_pickle_is_not_unpacked(saved: Training, copy: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 24))
    require_refused(saved, copy, replace_common(copy, stream.getvalue()))


def test_a_file_that_is_missing_or_short_is_refused(saved: Training, copy: Path) -> None:
    data = largest(copy)
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    require_refused(saved, copy, data, rule=f"{len(whole) // 2:,}")
    data.unlink()
    require_refused(saved, copy, copy, rule=data.name)
    data.write_bytes(whole)
    index = (copy / ".metadata").read_bytes()
    (copy / ".metadata").write_bytes(index[: len(index) // 2])
    require_refused(saved, copy, copy / ".metadata")
    (copy / ".metadata").unlink()
    require_refused(saved, copy, copy, rule=".metadata")


def test_an_index_that_the_files_contradict_is_refused(saved: Training, copy: Path) -> None:
    key = "decoder.layers.self_attention.linear_proj.weight"

    def swap(index: Any) -> None:
        """Two parts of one tensor have the place of each other's first half."""
        first, *_ = (each for each in index.storage_data if each.fqn == key)
        (other,) = (each for each in index.storage_data if each.fqn == "decoder.final_layernorm.weight")
        index.storage_data[first] = index.storage_data[other]

    alter_index(copy, swap)
    require_refused(saved, copy, copy, rule=key)

    def outside(index: Any) -> None:
        for each, place in index.storage_data.items():
            index.storage_data[each] = replace(place, relative_path="../../secret")

    alter_index(copy, outside)
    require_refused(saved, copy, copy)


def test_other_formats_are_refused_with_the_way_to_convert_them(saved: Training, copy: Path) -> None:
    form = json.loads((copy / "metadata.json").read_text())
    (copy / "metadata.json").write_text(json.dumps({**form, "sharded_backend": "zarr"}))
    require_refused(saved, copy, copy / "metadata.json", rule=("--ckpt-convert-format", "torch_dist"))
    legacy = copy.parent / "iter_0000007"
    (legacy / "mp_rank_00").mkdir(parents=True)
    (legacy / "mp_rank_00" / "model_optim_rng.pt").write_bytes(as_torch_saves({"args": 1}))
    require_refused(saved, legacy, legacy, rule=("mp_rank_00", "--ckpt-convert-format"))
    (copy.parent / "latest_checkpointed_iteration.txt").write_text("7")
    require_refused(saved, copy.parent, legacy, rule="mp_rank_00")
    (copy.parent / "latest_checkpointed_iteration.txt").write_text("../../etc")
    require_refused(saved, copy.parent, copy.parent / "latest_checkpointed_iteration.txt")
    (copy.parent / "latest_checkpointed_iteration.txt").unlink()
    require_refused(saved, copy.parent, copy.parent, rule=str(copy))
    require_refused(saved, copy / "nowhere", copy / "nowhere")
