"""`llmrecipes quantize` and `bench inference`: folders that transformers loads, close to the original."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llmrecipes.cli.app import run
from llmrecipes.engine.backends import backend
from llmrecipes.engine.core.backend import loaded as loaded_by_engine
from llmrecipes.engine.core.hessians import BLOCK
from llmrecipes.models import inference, inference_worker
from llmrecipes.models import quantize as quantizing
from llmrecipes.models.calibrate import CalibrationData, calibrate, gptq
from llmrecipes.models.quantize_options import QuantizeOptions
from llmrecipes.models.quantized_weights import SCHEMES, Scheme
from llmrecipes.plan.derive import derive
from llmrecipes.rundir import Run
from tests.helpers import LLAMA, ROOMY, environment, tiny_on, write_recipe
from tests.refusals import refused, require_message

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


def compressor_of(form: str) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(form)


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
    from compressed_tensors.quantization import QuantizationConfig

    schema = QuantizationConfig.model_validate(config)
    assert schema.quantization_status == "compressed" and schema.ignore == ["lm_head"]
    names = set(compressor_of(schema.format).compression_param_names(arithmetic.spec))
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
    assert scheme.group is not None
    columns = 2 * BLOCK
    inputs, weight = correlated(columns), torch.randn(24, columns, generator=torch.Generator().manual_seed(1))
    made, scale = gptq(weight, inputs.t() @ inputs, scheme)
    assert scale.shape == (24, columns // scheme.group)
    changed = (inputs @ (made - weight).t()).square().sum()
    assert changed < 0.2 * (inputs @ (scheme.rounded(weight) - weight).t()).square().sum()
    parts = scheme.compress("layer.weight", 24, lambda: made.split(5), scale)
    whole = compressor_of(scheme.kind.form).decompress(
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
    changed = calibrate(method, CalibrationData(model, IDS, Scheme(scheme), linears))
    assert {name.split(".")[-2] for name in changed} == {
        "input_layernorm", "q_proj", "k_proj", "v_proj", "post_attention_layernorm", "gate_proj", "up_proj",
    }  # fmt: skip
    torch.testing.assert_close(logits(model), exact, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["gpt_neox", "gemma"])
def test_scales_move_into_other_norms(kind: str) -> None:
    """With a bias (GPT-NeoX), and with a weight that one is added to (Gemma)."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes, **heads)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.add_(0.3 * torch.randn_like(value) if "norm" in name else 0)
    exact, output = logits(model), model.get_output_embeddings()
    linears = frozenset(
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not output
    )
    changed = calibrate("smoothquant", CalibrationData(model, IDS, Scheme("w8a8"), linears))
    assert any("norm" in name for name in changed)
    torch.testing.assert_close(logits(model), exact, atol=1e-3, rtol=1e-3)


@pytest.fixture
def outliers(llama: Path, folder: Path) -> Path:
    """The model with a channel of large activations and small weights, as large models have them."""
    source = folder / "outliers"
    if source.exists():
        return source
    model = loaded(llama)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[3] *= 200
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).weight[:, 3] /= 200
    model.save_pretrained(source)
    for path in llama.glob("tokenizer*"):
        (source / path.name).write_bytes(path.read_bytes())
    return source


def test_smoothquant_tames_outliers(outliers: Path, folder: Path, command: Command) -> None:
    errors = {}
    for method in ("rtn", "smoothquant"):
        text = ("--calibrate", f"text:{folder / 'text.txt'}", *TEXT) if method != "rtn" else ()
        out = folder / f"outliers-{method}"
        arguments = ("--scheme", "w8a8", "--method", method, *text, "--no-measure")
        assert command("quantize", str(outliers), str(out), *arguments)[0] == 0
        errors[method] = error(loaded(out), loaded(outliers))
    assert errors["smoothquant"] < 0.2 * errors["rtn"]


def test_awq_tames_outliers(outliers: Path) -> None:
    """Compared where it scales: at the matrices that read the channel."""
    scheme, errors = Scheme("int4", 64), []
    readers = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkv"]
    for calibrated in (False, True):
        model = loaded(outliers)
        if calibrated:
            calibrate("awq", CalibrationData(model, IDS, scheme, frozenset(f"{name}.weight" for name in readers)))
        with torch.no_grad():
            for name in readers:
                weight = model.get_submodule(name).weight
                weight.copy_(scheme.rounded(weight))
        errors.append(error(model, loaded(outliers)))
    assert errors[1] < 0.6 * errors[0], errors


def test_calibration_rows_are_documents_with_an_end(llama: Path, folder: Path, data_dir: Path) -> None:
    (folder / "two.jsonl").write_text('{"text": "word 1 word 2"}\n{"text": "word 3 word 4"}\n')
    options = QuantizeOptions("int8", "gptq", f"jsonl:{folder / 'two.jsonl'}", samples=2, length=4)
    rows = quantizing._rows(llama, str(llama), folder / "runs", data_dir, options)
    tokenizer = inference_worker.folder_tokenizer(llama)
    first, second = (tokenizer.encode(f"word {n} word {n + 1}") for n in (1, 3))
    assert rows.flatten().tolist() == [*first, tokenizer.eod, *second, tokenizer.eod][:8]


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_weights_are_those_that_training_saw(precision: str, folder: Path, corpus: Path, command: Command) -> None:
    train = {**TRAIN, "precision": precision}
    qat = {"scheme": "int4", "group_size": 32}
    recipe = tiny_on(corpus, f"aware-{precision}", model=WIDE, train=train, qat=qat)
    assert command("train", write_recipe(recipe, folder), "--run-id", "one", "--no-sample")[0] == 0
    out, scheme = folder / recipe.name, Scheme("int4", 32)
    rounding = ("--scheme", "int4", "--group-size", "32", "--no-measure")
    assert command("quantize", recipe.name, str(out), *rounding)[0] == 0
    engines, plan = backend(recipe), derive(recipe, 1, ROOMY)
    platform, entry = engines.platform(), Run(folder / "runs" / recipe.name / "one").require_checkpoint()
    with engines.join(recipe, platform):
        (module,) = loaded_by_engine(plan, platform, entry).modules
        with torch.no_grad():
            module(IDS, IDS, None)
    assert module.fake_quantizer is not None
    seen, file = module.fake_quantizer._rounded, load_file(out / "model.safetensors")
    compressor = compressor_of(scheme.kind.form)

    def written(*names: str) -> torch.Tensor:
        parts = ("weight_packed", "weight_scale", "weight_shape")
        states = ({part: file[f"model.layers.{name}.{part}"] for part in parts} for name in names)
        return torch.cat([compressor.decompress(state, scheme.spec)["weight"] for state in states])

    for number, layer in enumerate(module.decoder.layers):
        assert written(f"{number}.self_attn.o_proj").equal(seen[layer.self_attention.linear_proj])
        assert written(f"{number}.mlp.down_proj").equal(seen[layer.mlp.linear_fc2])
        both = written(*(f"{number}.mlp.{name}_proj" for name in ("gate", "up")))
        assert both.equal(seen[layer.mlp.linear_fc1]) and not both.equal(layer.mlp.linear_fc1.weight)
        heads, ours = (
            written(*(f"{number}.self_attn.{name}_proj" for name in "qkv")),
            seen[layer.self_attention.linear_qkv],  # whose rows are in groups of heads
        )
        assert set(map(tuple, heads.tolist())) == set(map(tuple, ours.tolist()))
    (folder / "held-out.txt").write_text("word 3 word 1\n" * 60)
    text, bits = ("--data", f"text:{folder / 'held-out.txt'}", "--limit", "2", "--json"), []
    for model in (recipe.name, str(out)):
        code, printed = command("eval", model, *text)
        assert code == 0
        bits.append(json.loads(printed)["results"][0]["metrics"]["bits_per_byte"])
    assert bits[0] == pytest.approx(bits[1], rel=1e-6 if precision == "fp32" else 5e-3)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats are measured without a new process for each, which imports everything again; a slow test starts them."""

    def measure(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        inference_worker.main(command[-1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(inference.subprocess, "run", measure)


def test_formats_are_measured_as_eval_does(llama: Path, folder: Path, command: Command, in_this_process: None) -> None:
    out = folder / "measured"
    few = ("--limit", "2", "--new-tokens", "4", "--threads", "1")
    (folder / "held-out.txt").write_text("word 3 word 1\n" * 60)
    text = ("--data", f"text:{folder / 'held-out.txt'}")
    code, printed = command("quantize", str(llama), str(out), "--scheme", "w8a8", "--json", *few, *text)
    assert code == 0
    table = [row["measured"] for row in json.loads(printed)["measured"]]
    code, printed = command(
        "bench", "inference", str(llama), str(out), "--formats", "fp32", "--json", *few,
        "--prompt-tokens", "8", "--repeats", "1", *text,
    )  # fmt: skip
    assert code == 0
    rows = json.loads(printed)
    assert [row["format"] for row in rows] == ["fp32", "w8a8"]
    assert rows[1]["bytes"] < 0.7 * rows[0]["bytes"]
    for row, before_or_after, model in zip(rows, table, (llama, out), strict=True):
        code, printed = command("eval", str(model), *text, "--limit", "2", "--json")
        assert code == 0
        expected = json.loads(printed)["results"][0]["metrics"]
        # Of the original, eval computes with our own layers.
        assert row["measured"]["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-5)
        assert before_or_after["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-5)
        assert row["measured"]["tokens_per_second"] > 0 and row["measured"]["peak_memory_bytes"] > 2**20
    before, after = (row["measured"]["bits_per_byte"] for row in rows)
    assert after != before and after == pytest.approx(before, rel=0.02)


def test_eval_refuses_quantised_weights_that_it_cannot_compute(llama: Path, folder: Path, command: Command) -> None:
    out, source = folder / "for-eval", ("--data", f"text:{folder / 'text.txt'}")
    assert command("quantize", str(llama), str(out), "--no-measure")[0] == 0
    code, printed = command("eval", str(out), *source, "--tp", "2")
    assert code == 2
    require_message(printed, "--tp", rule="--nproc")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (out / "config.json").write_text(json.dumps(config))
    code, printed = command("eval", str(out), *source)
    assert code == 2
    require_message(printed, str(out / "config.json"), rule="compressed-tensors")


@pytest.mark.parametrize("name", SCHEMES)
def test_pieces_change_nothing(name: str) -> None:
    weight = torch.randn(20, 128, generator=torch.Generator().manual_seed(0))
    weight[13] *= 5
    whole = Scheme(name).compress("w.weight", 20, lambda: [weight])
    parts = Scheme(name).compress("w.weight", 20, lambda: weight.split(6))
    assert whole.keys() == parts.keys() and all(value.equal(parts[key]) for key, value in whole.items())


WRITE = """
from pathlib import Path
from llmrecipes.hardware.process import peak_memory
from llmrecipes.hf import safetensors
from llmrecipes.models import quantized_weights
from llmrecipes.models.quantized_weights import QuantizedSource, Scheme
import torch

scheme = Scheme("int4")
source = QuantizedSource(safetensors.SafetensorsFolder(Path("in")), scheme, ["layer.weight"])
scheme.compress("warm.weight", 2, lambda: [torch.randn(2, 2048)])  # imports what it needs
quantized_weights.READ = 1 << 20
safetensors._CHUNK = 1 << 22
Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
before = peak_memory()
safetensors.write(source, {}, Path("out"))
print(peak_memory() - before)
"""


def test_memory_holds_pieces_and_a_result(tmp_path: Path) -> None:
    rows, columns = 16384, 2048
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    tensors = {"layer.weight": torch.randn(rows, columns), "embedding.weight": torch.randn(rows, columns)}
    save_file(tensors, tmp_path / "in/model.safetensors")
    (tmp_path / "in/config.json").write_text("{}")
    # A process of its own: what others have left in memory is given out and taken back too.
    ran = subprocess.run(
        [sys.executable, "-c", WRITE], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) < 0.6 * 4 * rows * columns
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as file:
        assert file.get_tensor("embedding.weight").equal(tensors["embedding.weight"])


@pytest.mark.slow
def test_programs_are_measured_too(llama: Path, folder: Path, command: Command) -> None:
    few = ("--limit", "2", "--new-tokens", "4", "--prompt-tokens", "8", "--repeats", "1", "--threads", "1")
    names, plot = "fp32,int4,onnx-int8,torch-export,gguf-q4_0", folder / "plot.svg"
    code, printed = command("bench", "inference", "llama", "--formats", names, "--plot", str(plot), "--json", *few)
    assert code == 0 and plot.stat().st_size > 1000
    rows = json.loads(printed)
    assert [row["format"] for row in rows] == names.split(",")
    measured = {row["format"]: row["measured"] for row in rows}
    expected = measured["fp32"]["bits_per_byte"]
    assert measured["torch-export"]["bits_per_byte"] == pytest.approx(expected, rel=1e-4)
    assert measured["torch-export"]["tokens"] == measured["fp32"]["tokens"]
    for name in ("int4", "onnx-int8"):
        assert measured[name]["bits_per_byte"] != expected
        assert measured[name]["bits_per_byte"] == pytest.approx(expected, rel=0.02)
    assert measured["onnx-int8"]["cache"] and not measured["torch-export"]["cache"]
    assert rows[4]["skipped"] or measured["gguf-q4_0"]


def test_the_largest_group_that_divides_all_rows_is_the_default(llama: Path, folder: Path, command: Command) -> None:
    out = folder / "default"
    code, printed = command("quantize", str(llama), str(out), "--scheme", "int4", "--no-measure", "--json")
    assert code == 0 and json.loads(printed)["group"] == 64  # rows of 64 and 192
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 64


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
        (str(llama), "--scheme", "int4", "--group-size", "128"): ("--group-size", "128"),
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


def test_other_files_are_copied_but_weights_code_and_links_out_of_the_folder(
    llama: Path, tmp_path: Path, command: Command
) -> None:
    model, secret = tmp_path / "model", tmp_path / "secret"
    shutil.copytree(llama, model)
    secret.write_text("secret")
    for name in ("notes.txt", "pytorch_model.bin", "model.onnx", "model.pt2", "code.py"):
        (model / name).write_text(name)
    quantise = ("quantize", str(model), str(tmp_path / "out"), "--no-measure")
    assert command(*quantise)[0] == 0
    added = {path.name for path in (tmp_path / "out").iterdir()} - {path.name for path in llama.iterdir()}
    assert added == {"notes.txt"}
    (model / "README.md").unlink()
    (model / "README.md").symlink_to(secret)
    shutil.rmtree(tmp_path / "out")
    code, printed = command(*quantise)
    assert code == 2
    require_message(printed, model / "README.md")
    assert not (tmp_path / "out").exists()


def test_a_program_that_may_run_code_is_loaded_only_if_it_is_trusted(tmp_path: Path, command: Command) -> None:
    (tmp_path / "model.pt2").write_bytes(b"")
    code, printed = command("bench", "inference", str(tmp_path))
    assert code == 2
    require_message(printed, tmp_path, rule="--trust-code")
    inference._require_trusted(str(tmp_path), "torch-export", inference.InferenceOptions(trust_code=True))


def test_gpt2_says_by_another_name_how_many_positions_it_has(tmp_path: Path) -> None:
    for written in ({"n_positions": 64}, {"max_position_embeddings": 64}):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, **written}))
        assert inference_worker.sizes(tmp_path) == (64, 9)
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    with refused(tmp_path / "config.json"):
        inference_worker.sizes(tmp_path)
