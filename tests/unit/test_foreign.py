"""`llmrecipes new --from`: configurations of other programs, against what these programs make of them."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.cli.app import run
from llmrecipes.foreign import megatron, shell
from llmrecipes.foreign.draft import key_named
from llmrecipes.recipe.load import changed_values, load
from llmrecipes.recipe.reading.keys import hint, keys
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.features import FEATURES
from tests.refusals import require_message

SCRIPT = """#!/bin/bash
# a comment with --lr 7
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8; NODES=${NODES:-2}
WORLD=$(($GPUS*$NODES))
LAYERS=24
DIST="--nproc_per_node $GPUS --nnodes $NODES"
MODEL_ARGS=(
    --num-layers $LAYERS   # of them
    --hidden-size 2048 --num-attention-heads 16
    --seq-length 4096
    --group-query-attention --num-query-groups 8
    --position-embedding-type rope --rotary-base 500000
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --normalization RMSNorm --norm-epsilon 1e-6
)
TRAIN="\\
    --micro-batch-size 2 \\
    --global-batch-size $((WORLD * 4)) \\
    --train-samples 6400000 \\
    --lr 3.0e-4 --min-lr 3e-5 --lr-warmup-fraction .01"
MODEL_ARGS+=(--bf16 --vocab-size 32000)
if [ -n "$WANDB" ]; then
    TRAIN+=" --wandb-project mine"
fi
EVIL=$(touch executed)
torchrun $DIST pretrain_gpt.py "${MODEL_ARGS[@]}" $TRAIN \\
    --save $1 --window-size 128,0 --attention-output-gate --use-distributed-optimizer \\
    --data-path 0.3 a 0.7 b --split 98,2,0 \\
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model my/tokenizer \\
    --eval-interval 500 --init-method-std 0.02 2>&1 | tee `touch executed`
"""

SAME_IN_MEGATRON = {
    "num_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "num_query_groups": "model.num_query_groups",
    "rotary_base": "model.rotary_base",
    "layernorm_epsilon": "model.layernorm_epsilon",
    "add_bias_linear": "model.add_bias_linear",
    "normalization": "model.normalization",
    "vocab_size": "model.vocab_size",
    "hidden_dropout": "model.hidden_dropout",
    "attention_dropout": "model.attention_dropout",
    "global_batch_size": "train.global_batch_size",
    "lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta2": "optimizer.adam_beta2",
    "lr_decay_style": "scheduler.lr_decay_style",
    "eval_interval": "train.eval_interval",
    "eval_iters": "train.eval_iters",
    "log_interval": "train.log_interval",
    "use_distributed_optimizer": "layout.use_distributed_optimizer",
}
"""Destinations of Megatron-LM's own parser, and the keys that must have their values."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def translated(path: Path | str, *options: str, capsys: pytest.CaptureFixture[str]) -> tuple[Recipe, dict[str, Any]]:
    capsys.readouterr()
    assert run(["new", "--from", str(path), "--force", "--json", *options]) == 0
    account = json.loads(capsys.readouterr().out)
    return load(account["path"]).recipe, account


def at(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def left_out(account: dict[str, Any]) -> dict[str, bool]:
    return {row["name"]: row["differs"] for row in account["left_out"]}


def parser() -> argparse.ArgumentParser:
    from megatron.training import arguments

    made = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(made)
    return made


def test_a_megatron_script_means_what_megatrons_parser_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "Run_1.sh").write_text(SCRIPT)
    recipe, account = translated("Run_1.sh", capsys=capsys)
    words = shell.read_script(SCRIPT).words
    theirs = parser().parse_known_args([word for word in words if word not in ("$1", "--save")])[0]
    assert {key: at(recipe, key) for key in SAME_IN_MEGATRON.values()} == {
        key: getattr(theirs, name) for name, key in SAME_IN_MEGATRON.items()
    }
    assert recipe.name == "run-1"
    assert (recipe.model.activation_func, recipe.model.gated_linear_unit) == ("silu", True)
    assert recipe.model.ffn_hidden_size == int(4 * 2048 * 2 / 3 / 64) * 64  # of Megatron-LM's validate_args
    assert recipe.train.train_iters == 6_400_000 // 64
    assert recipe.scheduler.lr_warmup_iters == 1_000
    assert [(source.location, source.weight) for source in recipe.data.sources] == [("a", 0.3), ("b", 0.7)]
    assert recipe.data.split == (98.0, 2.0, 0.0)
    left = left_out(account)
    assert recipe.model.window_size == (128, 0)
    assert (
        left["--attention-output-gate"]
        and left["--wandb-project"]
        and not left["--save"]
        and not left["--nproc-per-node"]
    )
    assert not (folder / "executed").exists()


BASH = {
    "variables": 'A=2; B="--lr 1e-3 --bf16"; python pretrain_gpt.py --num-layers $A $B --seq-length ${C:-$((A * 8))}',
    "quotes": """N='a b'; python pretrain_gpt.py --tokenizer-model "$N" --data-path $N --name 'x $N "y"' --x=\\$z""",
    "arrays": """A=(--num-layers 2
      --data-path "a b" c  # a comment
    )
    A+=(--lr 1); python pretrain_gpt.py "${A[@]}" -- ${A[*]} "${A[*]}" $A ${A[1]} ${A[@]:-x}""",
    "appended": 'A="--num-layers 2"; A+=" --lr 1"; A+=("--bf16"); torchrun pretrain_gpt.py $A "${A[1]}"',
    "unquoted arrays": 'A=("--lr 1" "--bf16"); python pretrain_gpt.py ${A[@]} --num-layers 2',
    "blends": 'B="0.3 a 0.7 b"; torchrun pretrain_gpt.py --num-layers 2 --data-path $B --split "98, 2, 0"',
    "continued": 'O=" \\\n  --num-layers 2 \\\n --lr 1 \\\n"; python pretrain_gpt.py $O \\\n --freq "([0]*1+[1]*2)"',
    "defaults": 'A=""; python pretrain_gpt.py --lr ${A:-3} --x "${A-4}" --num ${B:-${C-5}} ${A:+--no} ${D:="6 7"}',
    "sums": "N=2; G=8; W=$(($G*$N)); python pretrain_gpt.py --num-layers $((W / 3 + 1)) --lr 1",
    "other commands": "python tools/plot.py --num 9; torchrun pretrain_gpt.py --num-layers 2; python done.py --ok",
    "here": 'C="pretrain_gpt.py --num-layers 2 --lr 1e-3"; srun --nodes 2 python -u $C --bf16 2>&1 | tee log',
    "sourced": 'source ./conf.sh; . "$(dirname "${BASH_SOURCE[0]}")/more.sh"\npython pretrain_gpt.py ${CONF[@]} $MORE',
    "escapes": 'python pretrain_gpt.py --num-layers 2 --name "a\\"b" --other c\\ d --third "e\\f"',
}
"""Scripts of which bash says what they mean."""


@pytest.mark.parametrize("name", BASH)
def test_a_script_is_read_as_bash_reads_it(name: str, folder: Path) -> None:
    (folder / "conf.sh").write_text("CONF=(--num-layers 2)\nCONF+=(--name 'x y')\n")
    (folder / "more.sh").write_text('MORE="--lr 1 --bf16"\n')
    script = folder / "run.sh"
    script.write_text(BASH[name])
    recorded = r"""{ printf '%s\0' "$@" >> seen; printf '\n\0' >> seen; }"""
    known = "; ".join(f"{program}() {recorded}" for program in ("python", "torchrun", "srun"))
    before = f"{known}; tee() {{ :; }}; dirname() {{ echo {folder}; }}"
    subprocess.run(["bash", "-c", f"{before}\n. {script}"], check=True, timeout=20)
    commands = [words.split("\0") for words in (folder / "seen").read_text().split("\n\0")]
    expected = next(words for words in commands if any("pretrain_gpt.py" in word for word in words))
    at = next(number for number, word in enumerate(expected) if "pretrain_gpt.py" in word)
    assert shell.read_script(BASH[name], script).words == expected[at + 1 : -1]


def test_options_with_and_without_values_are_those_of_megatrons_parser() -> None:
    flags = megatron.flags()
    for action in parser()._actions:
        for option in action.option_strings:
            name = option.lstrip("-").replace("-", "_")
            if action.nargs != 0:
                assert not flags.fullmatch(name), name
                assert bool(megatron.LISTS.fullmatch(name)) is (action.nargs not in (None, 1, "?")), name
            elif key_named(name, synonyms=False) is not None:
                assert flags.fullmatch(name), name


TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 300 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 5"
)


@pytest.mark.parametrize(
    ("more", "left"),
    [
        ("--bf16 $EXTRA", {"$EXTRA": True}),
        ("--lr 2e-3 ${FLAGS[@]} --bf16", {"${FLAGS[@]}": True}),
        ('--use-mcore-models "$@"', {"$@": True, "--use-mcore-models": False}),
        ("--multi-latent-attention --position-embedding-type rope --kv-channels 16", {"--kv-channels": False}),
        ("--q-lora-rank 8 --mscale 2.0", {"--q-lora-rank": False, "--mscale": False}),
        ("--top-k 4 --temperature 0.5", {"--top-k": True, "--temperature": True}),
        ("--eval-iters 0 --eval-interval 7", {"--eval-iters": False}),
        ("--optimizer muon --use-distributed-optimizer", {"--use-distributed-optimizer": False}),
        ("--recompute-granularity selective --recompute-modules core_attn", {}),
        ("--window-size 128,0 --window-attn-skip-freq '([1]*1+[0]*1)'", {}),
    ],
)
def test_nothing_is_dropped_without_being_listed(
    more: str, left: dict[str, bool], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.sh").write_text(f"python pretrain_gpt.py {TINY} {more}\n")
    recipe, account = translated("run.sh", capsys=capsys)
    assert left_out(account) == left
    if "--eval-iters" in left:
        assert (recipe.data.split, recipe.train.eval_interval) == ((98.0, 0.0, 2.0), 7)
    if "muon" in more:
        assert not recipe.layout.use_distributed_optimizer
    if "window" in more:
        assert recipe.model.window_size == (128, 0)
        assert recipe.model.window_attn_skip_freq == [1, 0]
    if "core_attn" in more:
        assert recipe.layout.recompute_modules == ("core_attn",)


@pytest.mark.parametrize("program", ["pretrain_gpt", "pretrain_hybrid", "pretrain_mamba"])
def test_a_pattern_of_layers_is_translated(program: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = "--num-layers 8 --is-hybrid-model --hybrid-override-pattern"
    if program == "pretrain_hybrid":
        more = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --hybrid-layer-pattern"
    (folder / "run.sh").write_text(
        f"python {program}.py {TINY} --num-experts 4 --disable-bias-linear --pipeline-model-parallel-size 2"
        f" {more} '*-*-*E|*E'\n"
    )
    recipe, account = translated("run.sh", capsys=capsys)
    assert (recipe.model.num_layers, recipe.model.moe_layer_freq) == (4, [0, 0, 1, 1])
    assert recipe.layout.pipeline_model_parallel_layout == "Ettt|tL"
    assert not any(left_out(account).values())


def test_branches_and_other_files_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"""TP=1
if [ $NODES -gt 1 ]; then TP=8; FP=1; else ARGS=(--swiglu --untie-embeddings-and-output-weights); fi
source $CONF; source gone.sh; . /etc/profile
python tools/preprocess_data.py --input x --workers 2
python my/train.py {TINY} --tensor-model-parallel-size $TP
"""
    (folder / "run.sh").write_text(text)
    _, account = translated("run.sh", capsys=capsys)
    left = left_out(account)
    assert {name for name, differs in left.items() if differs} == {
        "--swiglu --untie-embeddings-and-output-weights TP=8", "source $CONF", "source gone.sh", "source /etc/profile",
    }  # fmt: skip
    assert left["my/train.py"] is False and left["tools/preprocess_data.py --input x --workers 2"] is False


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (f"torchrun pretrain_bert.py {TINY}", "--from"),
        (f"python pretrain_t5.py {TINY}", "--from"),
        (f"python pretrain_hybrid.py {TINY}", "--from"),
        (f"python tools/run_text_generation_server.py {TINY}", "--from"),
        (f"python pretrain_hybrid.py {TINY} --hybrid-layer-pattern M-*-", "--hybrid-layer-pattern"),
        (f"python pretrain_gpt.py {TINY} --spec megatron.core.models.hybrid.hybrid_layer_specs", "--spec"),
        (
            f"python pretrain_gpt.py {TINY} --multi-latent-attention --hybrid-layer-pattern *-",
            "--hybrid-layer-pattern",
        ),
        (f"python pretrain_gpt.py {TINY} --tokenizer-type BertWordPieceLowerCase", "--tokenizer-type"),
        (f"python pretrain_gpt.py {TINY} --encoder-num-layers 4", "--encoder-num-layers"),
    ],
)
def test_other_models_than_gpt_are_refused(
    text: str, where: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.sh").write_text(text)
    assert run(["new", "--from", "run.sh"]) == 2
    require_message(capsys.readouterr().err, where, rule="M" if "M-*-" in text else "pretrain_gpt.py")


def test_every_default_of_megatron_is_shared_or_written_out() -> None:
    known = {*megatron.DEFAULTS, *megatron.DEFAULTS_IF}
    # Derived by both programs (`translate`), unset there and required or without an effect here, or only for speed.
    apart = {
        "model.num_query_groups", "model.moe_router_dtype", "model.moe_token_dispatcher_type", "model.transformer_impl",
        "model.rope_type", "model.yarn_beta_fast", "model.yarn_beta_slow", "model.yarn_correction_range_round_to_int",
        "optimizer.muon_tp_mode", "checkpoint.save_interval", "train.eval_interval", "data.split",
        "tracking.tensorboard", "layout.micro_batch_size",
        "train.grad_reduce_in_fp32", "layout.recompute_granularity", "train.precision", "data.tokenizer.type",
    }  # fmt: skip
    different = set()
    for action in parser()._actions:
        key = key_named(action.dest)
        if key is None or key.rpartition(".")[2] in FEATURES or keys()[key].required:
            continue
        if action.default is None and not key.endswith(f".{action.dest}"):
            continue  # an old or a second option for the same
        if key in known:
            default = megatron.DEFAULTS.get(key, megatron.DEFAULTS_IF.get(key, (0, 0, 0))[2])
            assert default == action.default, key
        elif action.default != keys()[key].default:
            different.add(key)
    assert different <= apart, sorted(different - apart)


def test_arguments_in_yaml_and_on_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "num-layers 2 hidden-size 64 num-attention-heads 4 seq-length 32 vocab-size 300 micro-batch-size 1 lr 1e-3"
    pairs = list(zip(names.split()[::2], names.split()[1::2], strict=True))
    line = " ".join(f"--{name} {value}" for name, value in pairs) + " --train-iters 5 --squared-relu"
    (folder / "line.txt").write_text(line)
    flat = {name.replace("-", "_"): value for name, value in pairs} | {"train_iters": "5", "squared_relu": "true"}
    (folder / "flat.yaml").write_text("".join(f"{name}: {value}\n" for name, value in flat.items()))
    one, _ = translated("line.txt", "--cluster", "h100-ib", "--nodes", "2", capsys=capsys)
    assert one.train.global_batch_size == 16 and one.train.precision == "fp32"
    assert (one.model.activation_func, one.model.gated_linear_unit) == ("squared_relu", False)
    assert one.model.hidden_dropout == 0.1
    other, _ = translated("flat.yaml", "train.global_batch_size=16", capsys=capsys)
    assert other.model == one.model and other.optimizer == one.optimizer and other.train == one.train


@pytest.mark.parametrize(
    ("arguments", "key", "token"),
    [
        ("--num-layers 2 --hidden-size 64", "model.vocab_size", "model.vocab_size=VALUE"),
        ("--num-layers $LAYERS --vocab-size 9", "model.num_layers", "model.num_layers=VALUE"),
        ("--num-layers 2 --train-samples 9 --rampup-batch-size 1 1 9", "train.train_iters", "--train-samples"),
        ("--num-layers 2 --hidden-size 64 --num-experts 4 --moe-layer-freq ([0]*'x')", "--moe-layer-freq", ""),
    ],
)
def test_what_a_file_lacks_is_asked_for(
    arguments: str, key: str, token: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.sh").write_text(f"python pretrain_gpt.py {arguments}\n")
    assert run(["new", "--from", "run.sh"]) == 2
    printed = capsys.readouterr().err
    assert key in printed and token in printed and "Traceback" not in printed
    assert not list(folder.glob("*.yaml"))


BASE = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 300,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_theta": 10000.0, "initializer_range": 0.01, "bos_token_id": 1,
}  # fmt: skip


@pytest.fixture
def base(folder: Path) -> Path:
    """A Qwen2 with a tokenizer, without weights: only its shape is read."""
    from llmrecipes.data.tokens.templates import SPECIAL
    from llmrecipes.data.tokens.tokenizer import train

    path = folder / "base"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(BASE))
    backend, _ = train([f"question {number} yes" for number in range(99)], 300, SPECIAL)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    (folder / "chat.jsonl").write_text(
        "".join(f'{{"prompt": "question {number}", "completion": "yes"}}\n' for number in range(200))
    )
    return path


AXOLOTL = """
base_model: base
adapter: qlora
load_in_4bit: true
lora_r: 8
lora_alpha: 16
lora_target_modules: [q_proj, v_proj, gate_proj]
datasets: [{path: chat.jsonl, ds_type: json, type: chat_template}]
chat_template: chatml
sequence_len: 64
val_set_size: 0.1
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
learning_rate: 0.0002
optimizer: paged_adamw_8bit
gradient_checkpointing: true
saves_per_epoch: 1
flash_attention: true
loraplus_lr_ratio: 16
"""


def test_a_file_of_axolotl_is_a_fine_tuning(base: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ax.yaml").write_text(AXOLOTL)
    recipe, account = translated("ax.yaml", "mine", capsys=capsys)
    assert recipe.name == "mine" and recipe.train.pretrained == "base" and recipe.model.hidden_size == 64
    assert recipe.lora is not None and (recipe.lora.rank, recipe.lora.alpha) == (8, 16.0)
    assert recipe.lora.target_modules == ("linear_qkv", "linear_fc1")
    # 200 rows, of which a tenth is held out, twice, in steps of 8
    assert recipe.train.global_batch_size == 8 and recipe.train.train_iters == 45
    assert recipe.checkpoint.save_interval == 23 and recipe.scheduler.lr_warmup_iters == 1
    assert (recipe.optimizer.adam_beta2, recipe.optimizer.weight_decay) == (0.999, 0.0)
    assert recipe.data.split == (90.0, 10.0, 0.0) and recipe.data.chat is not None and not recipe.data.chat.packing
    assert recipe.layout.recompute_granularity == "full"
    assert left_out(account) == {"load_in_4bit": True, "loraplus_lr_ratio": True, "flash_attention": False}
    assert run(["new", "--from", "ax.yaml", "--force"]) == 0
    assert "llmrecipes finetune base --data jsonl:chat.jsonl --lora" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", "pretrain_gpt.py --data-path a --num-layers 2 --hidden-size 64 --num-attention-heads 4 --lr 1e-3"
                   " --seq-length 64 --micro-batch-size 1 --train-iters 9 --vocab-size 512"
                   " --wandb-api-key 0secret9 --ZERO 0"),
        ("ax.yaml", AXOLOTL + "wandb_api_key: 0secret9\nmax_steps: 9\nZERO: 0\n"),
        ("lf.yaml", "model_name_or_path: base\nstage: sft\ndataset: chat\ntemplate: qwen\nlora_rank: 4\nmax_steps: 9\n"
                    "wandb_api_key: 0secret9\ncutoff_len: 64\nZERO: 0\n"),
    ],
)  # fmt: skip
def test_a_zero_is_a_value(name: str, text: str, base: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("moe-aux-loss-coeff", "no-such-thing") if name == "run.sh" else ("neftune_alpha", "no_such_thing")
    for left in names:  # one of each kind of row
        (folder / name).write_text(text.replace("ZERO", left))
        assert run(["new", "--from", name, "data.sources=[{type: jsonl, path: chat.jsonl}]", "--force"]) == 0
        out = capsys.readouterr().out
        assert next(line.split()[1] for line in out.splitlines() if left in line).rstrip(",") == "0"
        assert "0secret9" not in out
    rate = "lr" if name == "run.sh" else "learning_rate"
    (folder / name).write_text(re.sub(r"(?m)^learning_rate.*\n| --lr 1e-3", "", text).replace("ZERO", rate))
    assert run(["new", "--from", name, "data.sources=[{type: jsonl, path: chat.jsonl}]", "--force"]) == 2  # no default
    require_message(capsys.readouterr().err, "optimizer.lr", rule="0")


def test_a_file_of_llamafactory_reads_its_list_of_datasets(
    base: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data").mkdir()
    columns = {"prompt": "prompt", "response": "completion"}
    entry = {"file_name": "../chat.jsonl", "columns": columns}
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    text = "model_name_or_path: base\nstage: sft\nfinetuning_type: full\ndataset: mine\ncutoff_len: 64\n"
    (folder / "lf.yaml").write_text(
        text + "do_train: true\nlearning_rate: 1.0e-5\nper_device_train_batch_size: 2\nbf16: true\n"
    )
    recipe, account = translated("lf.yaml", capsys=capsys)
    assert recipe.data.chat is not None and recipe.data.chat.completion_key == "completion" and recipe.lora is None
    assert recipe.train.train_iters == 300 and recipe.scheduler.lr_decay_style == "linear"  # 3 epochs of 200 in pairs
    assert not any(left_out(account).values())
    (folder / "dpo.yaml").write_text(text.replace("sft", "dpo").replace("mine", "none") + "max_steps: 9\n")
    recipe, account = translated("dpo.yaml", "data.sources=[{type: jsonl, path: pairs.jsonl}]", capsys=capsys)
    assert recipe.dpo is not None and recipe.dpo.beta == 0.1 and recipe.train.train_iters == 9
    assert run(["new", "--from", "dpo.yaml", "--force"]) == 2
    require_message(capsys.readouterr().err, "dataset", rule="data.sources")
    assert run(["new", "dpo", "--from", "dpo.yaml", "data.sources=[{type: jsonl, path: pairs.jsonl}]", "--force"]) == 2
    require_message(capsys.readouterr().err, "dpo.yaml", rule="--out DIR")
    assert "stage: dpo" in (folder / "dpo.yaml").read_text()
    (folder / "kto.yaml").write_text(text.replace("sft", "kto"))
    assert run(["new", "--from", "kto.yaml"]) == 2
    require_message(capsys.readouterr().err, "stage")


def test_epochs_of_data_that_is_elsewhere_are_not_guessed(
    base: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ax.yaml").write_text(AXOLOTL.replace("chat.jsonl", "gone.jsonl"))
    assert run(["new", "--from", "ax.yaml"]) == 2
    require_message(capsys.readouterr().err, "num_epochs", rule="train.train_iters=STEPS")
    recipe, _ = translated("ax.yaml", "train.train_iters=7", capsys=capsys)
    assert recipe.train.train_iters == 7


TITAN = """
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets"
[optimizer]
lr = 3e-4
[lr_scheduler]
warmup_steps = 100
decay_ratio = 0.2
decay_type = "sqrt"
min_lr_factor = 0.1
[training]
local_batch_size = 2
seq_len = 4096
steps = 1000
dataset = "c4"
[parallelism]
tensor_parallel_degree = 8
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "full"
[experiment]
odd = 3
"""


def test_a_toml_of_torchtitan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "llama.toml").write_text(TITAN)
    recipe, account = translated("llama.toml", "--cluster", "h100-ib", "--nodes", "4", capsys=capsys)
    assert (recipe.model.hidden_size, recipe.model.seq_length) == (4096, 4096)
    assert recipe.train.global_batch_size == 2 * 4  # 32 GPUs, 8 of them tensor-parallel
    schedule = recipe.scheduler
    assert (schedule.lr_decay_style, schedule.lr_wsd_decay_iters, schedule.lr_wsd_decay_style) == (
        "WSD", 200, "minus_sqrt",
    )  # fmt: skip
    assert (
        recipe.optimizer.min_lr == pytest.approx(3e-5) and changed_values(recipe)["data"]["sources"][0]["name"] == "en"
    )
    assert recipe.layout.recompute_granularity == "full"
    assert [name for name, differs in left_out(account).items() if differs] == ["experiment.odd"]
    (folder / "odd.toml").write_text(TITAN.replace("8B", "9B"))
    assert run(["new", "--from", "odd.toml"]) == 2
    require_message(capsys.readouterr().err, "model.flavor", rule="--like")


BRIDGE = """
model: {seq_length: 2048, tensor_model_parallel_size: 2, sequence_parallel: true}
train: {train_iters: 100, global_batch_size: 8, eval_iters: 10}
optimizer: {lr: 3.0e-4, min_lr: 3.0e-5}
scheduler: {lr_warmup_iters: 20, lr_decay_style: cosine}
checkpoint: {save: out, save_interval: 50}
rng: {seed: 7}
mixed_precision: bf16_mixed
dataset: {seq_length: 2048, odd: 1}
layout:
  micro_batch_size: 1
"""
NEMO = """
_target_: nemo.collections.llm.api.pretrain
model: {config: {_target_: nemo.collections.llm.gpt.model.llama.Llama3Config8B}}
trainer: {max_steps: 40, val_check_interval: 20, limit_val_batches: 3, devices: 8,
  strategy: {tensor_model_parallel_size: 4}}
data: {seq_length: 4096, global_batch_size: 16, micro_batch_size: 1}
optim: {config: {lr: 1.0e-4, weight_decay: 0.05}, lr_scheduler: {warmup_steps: 5, min_lr: 1.0e-6}}
"""


def test_yaml_of_nemo_and_megatron_bridge(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bridge.yaml").write_text(BRIDGE)
    recipe, account = translated("bridge.yaml", "--like", "llama3-8b", capsys=capsys)
    assert account["kind"] == "Megatron-Bridge" and recipe.model.seq_length == 2048 and recipe.train.seed == 7
    assert recipe.layout.sequence_parallel and recipe.scheduler.lr_warmup_iters == 20
    assert recipe.layout.name is None, "its layout is that of the file, with that program's defaults"
    assert left_out(account)["dataset.odd"]
    (folder / "nemo.yaml").write_text(NEMO)
    recipe, account = translated("nemo.yaml", capsys=capsys)
    assert account["kind"] == "NeMo" and (recipe.model.num_layers, recipe.model.seq_length) == (32, 4096)
    assert (recipe.train.train_iters, recipe.train.eval_interval, recipe.train.eval_iters) == (40, 20, 3)
    assert (recipe.optimizer.weight_decay, recipe.scheduler.lr_warmup_iters) == (0.05, 5)


def test_a_config_json_is_a_shape_to_train(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, account = translated("base/config.json", "--tokens", "100k", capsys=capsys)
    assert recipe.name == "base" and recipe.train.pretrained is None
    assert (recipe.model.init_method_std, recipe.model.add_qkv_bias, recipe.model.seq_length) == (0.01, True, 128)
    assert (
        recipe.data.tokenizer.type == "huggingface"
        and recipe.data.tokenizer.path == str(base)
        and recipe.model.vocab_size == 300
    )
    assert not left_out(account)["bos_token_id"]


@pytest.mark.parametrize("command", ["show", "train", "plan"])
def test_other_commands_name_the_translation(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.sh").write_text(SCRIPT)
    (folder / "ax.yaml").write_text(AXOLOTL)
    for name in ("run.sh", "./ax.yaml"):
        assert run([command, name]) == 2
        require_message(capsys.readouterr().err, name.removeprefix("./"), rule="--from")


def test_files_that_are_not_translated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.py").write_text("raise SystemExit(9)")
    (folder / "notes.yaml").write_text("a: 1\n")
    for name in ("config.py", "notes.yaml", "none.sh", "."):
        assert run(["new", "--from", name]) == 2
        require_message(capsys.readouterr().err, "--from")
    (folder / "llama.toml").write_text(TITAN)
    assert run(["new", "--from", "llama.toml", "--tokens", "1b"]) == 2
    require_message(capsys.readouterr().err, "--tokens")
    recipe = "name: x\nmodel: {num_layers: 1}\ntrain: {}\noptimizer: {}\nmodel_name_or_path: y\n"
    (folder / "x.yaml").write_text(recipe)  # a recipe with a foreign key is a recipe
    assert run(["show", "./x.yaml"]) == 2
    assert "train.pretrained" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("datasets", "data.sources"), ("sequence_len", "model.seq_length"), ("cutoff_len", "model.seq_length"),
        ("base_model", "train.pretrained"), ("model_name_or_path", "train.pretrained"), ("val_set_size", "data.split"),
        ("sample_packing", "data.chat.packing"), ("finetuning_type", "lora.rank"), ("adapter", "lora.rank"),
    ],
)  # fmt: skip
def test_names_of_fine_tuning_programs_are_answered(name: str, key: str) -> None:
    assert hint(name).keys == (key,)
