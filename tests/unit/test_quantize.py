"""`llmrecipes quantize` and `bench inference`: folders that transformers loads, close to the original."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open

from llmrecipes.cli.app import run
from llmrecipes.models import quantize as quantizing
from llmrecipes.models.calibrate import Calibration, calibrate, gptq
from llmrecipes.models.quantized_weights import SCHEMES, Scheme
from tests.helpers import LLAMA, tiny_on, write_recipe
from tests.refusals import require_message

TRAIN = {"train_iters": 2, "eval_interval": 2, "eval_iters": 1}
WIDE = {**LLAMA, "ffn_hidden_size": 192, "init_method_std": 0.1}
"""Rows of every matrix are whole groups of 64."""
TEXT = ("--samples", "8", "--length", "32")

Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantize")


@pytest.fixture
def command(folder: Path, data_dir: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str) -> tuple[int, str]:
        code = run([*arguments, "--runs-dir", str(folder / "runs"), "--data-dir", str(data_dir)])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out if code == 0 else captured.err

    return call


@pytest.fixture
def llama(folder: Path, corpus: Path, command: Command) -> Path:
    """A trained run `llama`, as a folder for transformers."""
    if not (folder / "hf").exists():
        recipe = tiny_on(corpus, "llama", model=WIDE, train=TRAIN)
        assert command("train", write_recipe(recipe, folder), "--run-id", "one")[0] == 0
        assert command("export", "llama", "--out", str(folder / "hf"))[0] == 0
        draw = random.Random(0)
        text = "".join(draw.choice("word 123456789 defghijk\n") for _ in range(30_000))
        (folder / "text.txt").write_text(text)
    return folder / "hf"


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


IDS = torch.arange(48).view(2, 24)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits.float()


def error(model: Any, exact: Any) -> float:
    """Mean squared error of the logits, as a part of their mean square."""
    wanted = logits(exact)
    return float((logits(model) - wanted).square().mean() / wanted.square().mean())


@torch.no_grad()
def rounded_by_hand(folder: Path, scheme: Scheme) -> Any:
    """The original with every matrix of a decoder layer replaced by its rounded values."""
    model = loaded(folder)
    if scheme.name == "nvfp4":
        model = model.to(torch.bfloat16)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.copy_(scheme.rounded(module.weight))
    return model


BOUNDS = {"int8": 1e-9, "int4": 1e-9, "nvfp4": 1e-3, "w8a8": 3e-3, "fp8": 0.03}
"""nvfp4 computes in bf16; w8a8 and fp8 round activations too."""


@pytest.mark.parametrize(("scheme", "bound"), BOUNDS.items())
def test_transformers_loads_the_rounded_weights(
    scheme: str, bound: float, llama: Path, folder: Path, command: Command
) -> None:
    group = ("--group-size", "64") if scheme == "int4" else ()
    out = folder / f"rtn-{scheme}"
    code, printed = command(
        "quantize", str(llama), str(out), "--scheme", scheme, "--no-measure", "--json", *group
    )  # fmt: skip
    assert code == 0
    report = json.loads(printed)
    assert report["matrices"] == 14 and report["bytes"] < report["bytes_before"]
    arithmetic = Scheme(scheme, 64 if group else None)
    assert error(loaded(out), rounded_by_hand(llama, arithmetic)) < bound
    # vLLM reads the same package's schema and names.
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    schema = QuantizationConfig.model_validate(config)
    assert schema.quantization_status == "compressed" and schema.ignore == ["lm_head"]
    names = set(BaseCompressor.get_value_from_registry(schema.format).compression_param_names(arithmetic.spec))
    with safe_open(out / "model.safetensors", framework="pt") as file:
        parts = {name.rpartition(".")[2] for name in file.keys() if ".q_proj." in name}  # noqa: SIM118
    assert parts == names
    assert {path.name for path in out.iterdir()} >= {"tokenizer.json", "README.md", "generation_config.json"}


@pytest.mark.parametrize(
    ("scheme", "method"),
    [(name, method) for name, kind in SCHEMES.items() for method in kind.methods[1:]],
)
def test_calibrated_weights_are_close(scheme: str, method: str, llama: Path, folder: Path, command: Command) -> None:
    out = folder / f"{method}-{scheme}"
    group = ("--group-size", "32") if scheme == "int4" else ()
    source = ("llama",) if (scheme, method) == ("int8", "gptq") else (str(llama), "--calibrate")
    text = () if len(source) == 1 else (f"text:{folder / 'text.txt'}",)
    code, printed = command(
        "quantize", source[0], str(out), *source[1:], *text, "--scheme", scheme, "--method", method, "--no-measure",
        "--json", *TEXT, *group,
    )  # fmt: skip
    assert code == 0 and json.loads(printed)["calibration_tokens"] == 256
    assert error(loaded(out), loaded(llama)) < (0.25 if SCHEMES[scheme].bits == 4 else 0.03)
    assert not list(folder.glob(".*"))


def correlated(columns: int) -> torch.Tensor:
    """Inputs [tokens, columns] whose columns have to do with each other."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(512, columns // 4, generator=draw) @ torch.randn(columns // 4, columns, generator=draw)


@pytest.mark.parametrize("group", [None, 32])
def test_gptq_keeps_the_products(group: int | None) -> None:
    scheme = Scheme("int4", group)
    inputs, weight = correlated(128), torch.randn(24, 128, generator=torch.Generator().manual_seed(1))
    made, scale = gptq(weight, inputs.t() @ inputs, scheme)
    assert scale.shape == (24, 128 // (group or 128))
    changed = (inputs @ (made - weight).t()).square().sum()
    assert changed < 0.5 * (inputs @ (scheme.rounded(weight) - weight).t()).square().sum()
    parts = scheme.compress("layer.weight", made, scale)
    whole = BaseCompressor.get_value_from_registry(scheme.kind.form).decompress(
        {key.removeprefix("layer."): value for key, value in parts.items()}, scheme.spec
    )
    torch.testing.assert_close(whole["weight"], made)


@pytest.mark.parametrize(("method", "scheme"), {"smoothquant": "w8a8", "awq": "int8"}.items())
def test_moved_scales_change_nothing_before_rounding(method: str, scheme: str, llama: Path) -> None:
    model = loaded(llama)
    exact = logits(model)
    linears = frozenset(
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    ) - {"lm_head.weight"}
    changed = calibrate(method, Calibration(model, IDS, Scheme(scheme), linears))
    assert {name.split(".")[-2] for name in changed} == {
        "input_layernorm", "q_proj", "k_proj", "v_proj", "post_attention_layernorm", "gate_proj", "up_proj",
    }  # fmt: skip
    torch.testing.assert_close(logits(model), exact, atol=1e-3, rtol=1e-3)


def test_smoothquant_tames_outliers(llama: Path, folder: Path, command: Command) -> None:
    """A channel of large activations and small weights, as large models have them."""
    model = loaded(llama)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[3] *= 200
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).weight[:, 3] /= 200
    source = folder / "outliers"
    model.save_pretrained(source)
    for path in llama.glob("tokenizer*"):
        (source / path.name).write_bytes(path.read_bytes())
    errors = {}
    for method in ("rtn", "smoothquant"):
        text = ("--calibrate", f"text:{folder / 'text.txt'}", *TEXT) if method != "rtn" else ()
        out = folder / f"outliers-{method}"
        arguments = ("--scheme", "w8a8", "--method", method, *text, "--no-measure")
        assert command("quantize", str(source), str(out), *arguments)[0] == 0
        errors[method] = error(loaded(out), model)
    assert errors["smoothquant"] < 0.2 * errors["rtn"]


def test_formats_are_measured_on_the_same_text(llama: Path, folder: Path, command: Command) -> None:
    out, plot = folder / "measured", folder / "plot.svg"
    assert command("quantize", "llama", str(out), "--scheme", "w8a8", "--no-measure")[0] == 0
    few = ("--limit", "2", "--new-tokens", "4", "--prompt-tokens", "8", "--repeats", "1", "--threads", "1")
    (folder / "held-out.txt").write_text("word 3 word 1\n" * 60)
    text = ("--data", f"text:{folder / 'held-out.txt'}")
    code, printed = command(
        "bench", "inference", str(llama), str(out), "--formats", "fp32", "--plot", str(plot), "--json", *few, *text
    )  # fmt: skip
    assert code == 0
    rows = json.loads(printed)
    assert [row["format"] for row in rows] == ["fp32", "w8a8"] and plot.stat().st_size > 1000
    code, printed = command("eval", str(llama), *text, "--limit", "2", "--json")
    assert code == 0
    expected = json.loads(printed)["results"][0]["metrics"]
    first, second = (row["measured"] for row in rows)
    assert first["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-4)
    assert second["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=0.02)
    assert second["bits_per_byte"] != first["bits_per_byte"]
    assert rows[1]["bytes"] < 0.7 * rows[0]["bytes"]
    assert all(each["tokens_per_second"] > 0 and each["peak_memory_bytes"] > 2**20 for each in (first, second))


@pytest.mark.slow
def test_programs_are_measured_too(llama: Path, folder: Path, command: Command) -> None:
    few = ("--limit", "2", "--new-tokens", "4", "--prompt-tokens", "8", "--repeats", "1", "--threads", "1")
    code, printed = command("bench", "inference", "llama", "--formats", "int4", *few)
    assert code == 2
    require_message(printed, "--group-size", rule="128")
    names = "fp32,int8,onnx,torch-export,gguf-q8_0"
    code, printed = command("bench", "inference", "llama", "--formats", names, "--json", *few)
    assert code == 0
    rows = json.loads(printed)
    assert [row["format"] for row in rows] == ["fp32", "int8", "onnx", "torch-export", "gguf-q8_0"]
    measured = {row["format"]: row["measured"] for row in rows}
    assert measured["onnx"]["bits_per_byte"] == pytest.approx(measured["fp32"]["bits_per_byte"], rel=1e-4)
    assert measured["onnx"]["tokens"] == measured["torch-export"]["tokens"] == measured["fp32"]["tokens"]
    assert (not measured["onnx"]["cache"] and rows[4]["skipped"]) or measured["gguf-q8_0"]


def test_what_cannot_be_quantised_is_refused(
    llama: Path, folder: Path, corpus: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = folder / "short.txt"
    short.write_text("word 1\n" * 20)
    quantised, exists = folder / "twice", folder / "exists"
    assert command("quantize", str(llama), str(quantised), "--no-measure")[0] == 0
    exists.mkdir()
    calibrated = ("--method", "gptq", "--calibrate")
    cases: dict[tuple[str, ...], tuple[str, str]] = {
        (str(llama), "--scheme", "int3"): ("--scheme", "nvfp4"),
        (str(llama), "--method", "hqq"): ("--method", "smoothquant"),
        (str(llama), "--scheme", "fp8", "--method", "gptq"): ("--method", "smoothquant"),
        (str(llama), "--scheme", "int4"): ("--group-size", "128"),
        (str(llama), "--group-size", "64"): ("--group-size", "int8"),
        (str(llama), "--scheme", "nvfp4", "--dtype", "fp32"): ("--dtype", "bf16"),
        (str(llama), "--method", "gptq"): ("--calibrate", "gptq"),
        (str(llama), *calibrated, f"text:{short}"): ("--calibrate", "128"),
        (str(llama), *calibrated, f"text:{folder / 'text.txt'}", "--samples", "2"): ("--samples", "192"),
        (str(llama), *calibrated, f"text:{short}", "--length", "999"): ("--length", "64"),
        (str(llama), "--calibrate", "stdlib"): ("--calibrate", "rtn"),
        (str(quantised), "--scheme", "w8a8"): (str(quantised / "config.json"), "fp32"),
        ("no-such-run",): ("no-such-run", ""),
    }
    for arguments, (where, token) in cases.items():
        code, printed = command("quantize", *arguments[:1], str(folder / "refused"), *arguments[1:], "--no-measure")
        assert code == 2, arguments
        assert where in printed and token in printed, printed
    code, printed = command("quantize", str(llama), str(exists))
    assert code == 2 and str(exists) in printed
    monkeypatch.setattr(quantizing, "find_spec", lambda _: None)
    code, printed = command("quantize", str(llama), str(folder / "refused"))
    assert code == 2
    require_message(printed, "llmrecipes quantize", rule="llmrecipes[quantize]")
    assert not list(folder.glob("*refused*")) and not list(folder.glob(".*.part*"))


def test_experts_are_refused(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, max_position_embeddings=32,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "moe")
    assert run(["quantize", str(tmp_path / "moe"), str(tmp_path / "out")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["moe"]
