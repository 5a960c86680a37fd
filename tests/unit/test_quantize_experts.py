"""`llmrecipes quantize` of models with experts: transformers stacks what it unpacks, and routers stay."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llmrecipes.cli.app import run
from llmrecipes.hf.safetensors import SafetensorsFolder
from llmrecipes.models import inference, inference_worker
from llmrecipes.models.calibrate import CalibrationData, calibrate
from llmrecipes.models.quantize import linear_layers
from llmrecipes.models.quantized_weights import Scheme
from tests.helpers import LLAMA, tiny_on, write_recipe
from tests.hf_models import EXPERTS, VOCABULARY, saved
from tests.refusals import require_message
from tests.unit.test_hf_predictions import published

IDS = torch.arange(48).view(2, 24) % VOCABULARY


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command printed with `--json`, behind what an import has said."""
    text = capsys.readouterr().out
    return json.loads(text[text.index("{") :])


@torch.no_grad()
def error(model: Any, exact: Any) -> float:
    """Mean squared error of the logits, as a part of their mean square."""
    wanted = exact(IDS).logits.float()
    return float((model(IDS).logits.float() - wanted).square().mean() / wanted.square().mean())


@pytest.mark.parametrize(
    ("kind", "scheme", "group", "dtype", "layers", "router"),
    [
        ("mixtral", "int8", None, torch.float32, 2, "block_sparse_moe.gate"),
        ("qwen3_moe", "int4", 32, torch.float32, 2, "mlp.gate"),
        ("deepseek_v3", "fp8", None, torch.bfloat16, 1, "mlp.gate"),
    ],
)
def test_transformers_loads_rounded_experts_and_exact_routers(
    kind: str,
    scheme: str,
    group: int | None,
    dtype: torch.dtype,
    layers: int,
    router: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    original: Any = saved(kind, tmp_path / "hf")
    options = [*([] if group is None else ["--group-size", str(group)])]
    options += ["--dtype", "bf16"] if dtype is torch.bfloat16 else []
    arguments = [str(tmp_path / "hf"), str(tmp_path / "out"), "--scheme", scheme, *options]
    assert run(["quantize", *arguments, "--no-measure", "--json"]) == 0
    report = printed(capsys)
    assert report["expert_matrices"] == 3 * EXPERTS * layers and report["bytes"] < 0.5 * report["bytes_before"]

    model, arithmetic = loaded(tmp_path / "out"), Scheme(scheme, group)
    found, seen = dict(model.named_parameters()), 0
    for name, value in original.named_parameters():
        if ".mlp.experts." in name:
            wanted = torch.stack([arithmetic.rounded(expert.detach().to(dtype)) for expert in value])
            torch.testing.assert_close(found[name], torch.nn.Parameter(wanted.to(dtype)))
        elif name.endswith(".mlp.gate.weight"):
            assert found[name].equal(value.to(dtype))
        else:
            continue
        seen += 1
    assert seen == 3 * layers
    # Close scores may select other experts in bf16 and behind rounded layers.
    assert 0 < error(model, original) < (0.05 if scheme == "int8" else 0.2)

    first = range(2)[-layers]
    ignored = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", f"model.layers.{first}.{router}"} <= set(ignored)
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name.endswith("e_score_correction_bias"):
                assert file.get_slice(name).get_dtype() == "F32"


@pytest.mark.parametrize("method", [(), ("--method", "gptq", "--samples", "8", "--length", "32")])
def test_layers_of_multi_token_prediction_stay_as_they_are(
    method: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    original = published(tmp_path / "hf", 2)
    tokenizer(tmp_path / "hf")
    text = ("--calibrate", f"text:{__file__}") if method else ()
    arguments = ["quantize", str(tmp_path / "hf"), str(tmp_path / "out"), "--scheme", "int8", "--no-measure", "--json"]
    assert run([*arguments, *method, *text]) == 0
    assert printed(capsys)["expert_matrices"] == 3 * EXPERTS
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    further = [name for name in original if name.startswith(("model.layers.2.", "model.layers.3."))]
    assert len(further) > 40
    assert all(torch.equal(tensors[name], original[name]) for name in further)
    assert not {name for name in tensors if name.startswith(("model.layers.2.", "model.layers.3."))} - {*further}
    assert error(loaded(tmp_path / "out"), loaded(tmp_path / "hf")) < 0.05
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 2
    ignored = [each.removeprefix("re:") for each in config["quantization_config"]["ignore"] if each.startswith("re:")]
    modules = {name.removesuffix(".weight") for name in further}
    assert all(any(re.match(pattern, module) for pattern in ignored) for module in modules)


def tokenizer(folder: Path) -> None:
    """Each letter of ASCII is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, "\0"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))


def test_what_experts_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved("mixtral", tmp_path / "hf")
    arguments = ["quantize", str(tmp_path / "hf"), str(tmp_path / "out"), "--no-measure"]
    for *options, rule in (("--scheme", "w8a8", "fp8"), ("--scheme", "nvfp4", "int4"), ("--method", "awq", "--method")):
        assert run([*arguments, *options]) == 2
        require_message(capsys.readouterr().err, options[0], rule=rule)
    # The experts of a layer as one tensor, as transformers computes with them.
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "hf/model.safetensors"
    )
    assert run(arguments) == 2
    require_message(capsys.readouterr().err, tmp_path / "hf", rule="model.layers.0.mlp.experts.down_proj")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@torch.no_grad()
def test_gptq_rounds_experts_by_the_tokens_that_visit_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    exact: Any = saved("qwen3_moe", tmp_path)
    source = SafetensorsFolder(tmp_path)
    layers = linear_layers(tmp_path, source.names(), source.shape)
    rows = torch.randint(16, (16, 32), generator=torch.Generator().manual_seed(0))  # few tokens: their states depend
    scheme = Scheme("int4", 32)

    def off(model: Any) -> float:
        return float((model(rows).logits - exact(rows).logits).square().mean())

    calibrated, nearest = loaded(tmp_path), loaded(tmp_path)
    for place in layers.experts.values():
        whole = nearest.get_parameter(place.parameter)[place.expert]
        rows_of = slice(place.first, place.first + place.rows)
        whole[rows_of].copy_(scheme.rounded(whole[rows_of]))
    assert all(  # every row of every expert was rounded by its place
        value[0].equal(scheme.rounded(exact.get_parameter(name)[0]))
        for name, value in nearest.named_parameters()
        if ".mlp.experts." in name
    )
    changed = calibrate("gptq", CalibrationData(calibrated, rows, scheme, frozenset(), experts=layers.experts))
    assert changed.keys() == layers.experts.keys() and off(calibrated) < 0.6 * off(nearest)


@pytest.mark.slow
def test_a_run_with_experts_is_measured_as_eval_does(
    tmp_path: Path,
    corpus: Path,
    data_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        inference_worker.main(command[-1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(inference.subprocess, "run", measure)  # in this process: a new one imports everything again
    shape = {**LLAMA, "num_moe_experts": 4, "moe_router_topk": 2, "init_method_std": 0.1}
    recipe = tiny_on(corpus, "experts", model=shape, train={"train_iters": 2, "eval_interval": 2, "eval_iters": 1})
    places = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir)]
    assert run(["train", write_recipe(recipe, tmp_path), "--run-id", "one", *places]) == 0
    capsys.readouterr()
    (tmp_path / "text.txt").write_text("word 3 word 1\n" * 60)
    text = ["--data", f"text:{tmp_path / 'text.txt'}", "--limit", "2", "--json", *places]
    few = ["--new-tokens", "4", "--threads", "1"]
    assert run(["quantize", "experts", str(tmp_path / "out"), *few, *text]) == 0
    before, after = (row["measured"]["bits_per_byte"] for row in printed(capsys)["measured"])
    assert after != before and after == pytest.approx(before, rel=0.02)
    assert run(["eval", str(tmp_path / "out"), *text]) == 0
    metrics = printed(capsys)["results"][0]["metrics"]
    assert metrics["bits_per_byte"] == pytest.approx(after, rel=1e-5)

    few = ["--method", "gptq", "--samples", "8", "--length", "32", "--no-measure", "--json", *places]
    assert run(["quantize", "experts", str(tmp_path / "gptq"), *few]) == 0
    assert printed(capsys)["unvisited_matrices"] == 0
    assert 0 < error(loaded(tmp_path / "gptq"), loaded(tmp_path / "out")) < 0.05
