"""`llmrecipes serve`: which program is started and how; it ends with this one."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmrecipes.cli.app import run
from llmrecipes.models.serve import TRANSFORMERS_NEEDS, Installed, server
from tests.helpers import environment
from tests.refusals import refused, require_message

ADDRESS = ("127.0.0.1", 8000)
STANDIN = """
import http.server, json, os, signal, subprocess, sys

helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])


def end(*_):
    helper.kill()
    sys.exit()


signal.signal(signal.SIGTERM, end)
options = dict(zip(sys.argv, sys.argv[1:]))


server = http.server.HTTPServer((options["--host"], int(options["--port"])), http.server.SimpleHTTPRequestHandler)
told = {"arguments": sys.argv[1:], "offline": os.environ.get("HF_HUB_OFFLINE"), "processes": [os.getpid(), helper.pid]}
print(json.dumps(told), flush=True)
server.serve_forever()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def here(*programs: str, missing: tuple[str, ...] = ()) -> Installed:
    return Installed({name: f"/opt/{name}" for name in programs}.get, missing)


@pytest.mark.parametrize(
    ("programs", "gguf", "backend"),
    [
        ([], False, "transformers"),
        (["vllm", "trtllm-serve"], False, "vllm"),
        (["trtllm-serve", "llama-server", "convert_hf_to_gguf.py"], False, "tensorrt-llm"),
        (["vllm", "llama-server"], True, "vllm"),
        (["llama-server"], False, "transformers"),
        (["llama-server"], True, "llama.cpp"),
        (["llama-server", "convert_hf_to_gguf.py"], False, "llama.cpp"),
    ],
)
def test_the_first_server_that_can_read_the_model_is_taken(
    model: Path, programs: list[str], gguf: bool, backend: str
) -> None:
    if gguf:
        (model / "model.gguf").touch()
    assert server(model, None, *ADDRESS, here(*programs)).backend == backend


def test_commands(model: Path) -> None:
    where = ("--host", "127.0.0.1", "--port", "8000")
    found = server(model, "vllm", *ADDRESS, here("vllm"), ["--max-model-len", "512"])
    assert found.command == ("/opt/vllm", "serve", str(model), *where, "--max-model-len", "512")
    found = server(model, "tensorrt-llm", *ADDRESS, here("trtllm-serve"), ["--tp_size", "2"])
    assert found.command == ("/opt/trtllm-serve", str(model), *where, "--tp_size", "2")
    found = server(model, None, *ADDRESS, here())
    assert found.command == (sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), *where)
    found = server(model, None, *ADDRESS, here("llama-server", "convert_hf_to_gguf.py"))
    assert found.command == ("/opt/llama-server", "--model", str(model / "model.gguf"), *where)
    assert found.before == ("/opt/convert_hf_to_gguf.py", str(model), "--outfile", str(model / ".model.gguf.part"))
    (model / "model.gguf").touch()
    assert server(model / "model.gguf", None, *ADDRESS, here("vllm", "llama-server")).command == found.command


def test_what_cannot_be_started_is_refused(model: Path) -> None:
    for backend, installed, rule in (
        ("ollama", here(), "llama.cpp"),
        ("vllm", here(), "--backend"),
        ("tensorrt-llm", here(), "trtllm-serve"),
        ("llama.cpp", here(), "llama-server"),
        ("transformers", here(missing=("openai",)), ("transformers[serving]", "llmrecipes[serve]")),
    ):
        where = "--backend" if backend == "ollama" else f"--backend {backend}"
        with refused(where, rule=rule if backend != "vllm" else ()):
            server(model, backend, *ADDRESS, installed)
    with refused(model, rule=("model.gguf", "convert_hf_to_gguf.py")):
        server(model, "llama.cpp", *ADDRESS, here("llama-server"))
    for backend in ("transformers", "tensorrt-llm"):
        with refused(model / "x.gguf", rule="config.json"):
            server(model / "x.gguf", backend, *ADDRESS, here("trtllm-serve"))
    with refused(model.parent / "a@b", rule="--backend vllm"):
        server(model.parent / "a@b", None, *ADDRESS, here())


def test_quantised_weights_are_served_where_they_are_unpacked(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised = {"model_type": "llama", "quantization_config": {"quant_method": "compressed-tensors"}}
    (model / "config.json").write_text(json.dumps(quantised), "utf-8")
    programs = ("llama-server", "convert_hf_to_gguf.py")
    assert server(model, None, *ADDRESS, here("trtllm-serve", *programs)).backend == "transformers"
    with refused(model, rule="ModelOpt"):
        server(model, "tensorrt-llm", *ADDRESS, here("trtllm-serve"))
    assert server(model, None, *ADDRESS, here("vllm", *programs)).backend == "vllm"
    with refused(model, rule="--to gguf"):
        server(model, "llama.cpp", *ADDRESS, here(*programs))
    with refused("--backend transformers", rule="llmrecipes[quantize]"):
        server(model, None, *ADDRESS, here(missing=("compressed_tensors",)))
    (model / "model.gguf").touch()
    assert server(model, None, *ADDRESS, here(*programs)).backend == "llama.cpp"
    quantised["quantization_config"] = {"quant_method": "gptq"}
    (model / "config.json").write_text(json.dumps(quantised), "utf-8")
    assert run(["serve", str(model), "--dry-run"]) == 2
    require_message(capsys.readouterr().err, model / "config.json", rule="compressed-tensors")


def test_models_that_are_not_served(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "no-such-run", "--dry-run"]) == 2
    require_message(capsys.readouterr().err, "runs", rule="no-such-run")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert run(["serve", str(model), "--dry-run"]) == 2
    require_message(capsys.readouterr().err, model)
    for name in ("tokenizer_config.json", "config.json"):
        (model / name).write_text('{"auto_map": {"AutoModel": "code.Model"}}', "utf-8")
        assert run(["serve", str(model), "--dry-run"]) == 2
        require_message(capsys.readouterr().err, model / name, rule="(auto_map)")


@pytest.fixture
def standins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """vLLM, llama.cpp and its converter, which tell over HTTP how they were started."""
    folder = tmp_path / "bin"
    folder.mkdir()
    convert = "import sys; open(sys.argv[3], 'w').write('converted')"
    for name, code in (("vllm", STANDIN), ("llama-server", STANDIN), ("convert_hf_to_gguf.py", convert)):
        program = folder / name
        program.write_text(f"#!{sys.executable}\n{code}", "utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def started(model: Path, ready: str, *options: str) -> tuple[subprocess.Popen[str], str]:
    """The command, and the first line of its server in which the regular expression `ready` is found."""
    process = subprocess.Popen(
        [sys.executable, "-m", "llmrecipes.cli", "serve", str(model), *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # in the background it is ignored
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        if re.search(ready, line):
            return process, line
        lines.append(line)
    raise AssertionError("".join(lines))


def served(model: Path, *options: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """The command, and what the stand-in says of itself once it listens."""
    process, line = started(model, "^{", *options)
    return process, json.loads(line)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_transformers_own_server_answers_with_greedy_text(scheme: str | None, tmp_path: Path, unused_port: int) -> None:
    import tokenizers
    import transformers

    from tests.hf_models import VOCABULARY, saved

    model = tmp_path if scheme is None else tmp_path / scheme
    theirs: Any = saved("llama" if scheme is None else "mixtral", tmp_path)
    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train_from_iterator(["def answer(): return 42"] * 9, VOCABULARY, special_tokens=["<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        eos_token="<end>",  # noqa: S106 - no password
    )
    tokenizer.save_pretrained(tmp_path)
    if scheme is not None:
        assert run(["quantize", str(tmp_path), str(model), "--scheme", scheme, "--no-measure"]) == 0
        theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    prompt = tokenizer("def answer", return_tensors="pt")
    ids = theirs.generate(**prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    expected = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])

    options = ("--backend", "transformers", "--port", str(unused_port))
    process, _ = started(model, "^INFO:     Uvicorn running", *options)
    try:
        body = json.dumps({"prompt": "def answer", "max_tokens": 8, "temperature": 0}).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{unused_port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:  # noqa: S310
            assert json.load(answer)["choices"][0]["text"] == expected
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=240)
        assert process.returncode == 0, printed
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_server_ends_with_the_command(
    model: Path, standins: Path, unused_port: int, number: signal.Signals
) -> None:
    process, answer = served(model, "--backend", "vllm", "--port", str(unused_port), "--", "--seed", "1")
    assert answer["offline"] == "1"
    arguments = ["serve", str(model), "--host", "127.0.0.1", "--port", str(unused_port), "--seed", "1"]
    assert answer["arguments"] == arguments
    server_and_helper = [psutil.Process(process_id) for process_id in answer["processes"]]
    process.send_signal(number)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == (-signal.SIGKILL if number is signal.SIGKILL else 0), printed
    assert not psutil.wait_procs(server_and_helper, timeout=240)[1]
    assert "Traceback" not in printed


def test_llama_cpp_gets_a_converted_file(model: Path, standins: Path, unused_port: int) -> None:
    process, answer = served(model, "--backend", "llama.cpp", "--port", str(unused_port))
    assert answer["arguments"] == [
        "--model",
        str(model / "model.gguf"),
        "--host",
        "127.0.0.1",
        "--port",
        str(unused_port),
    ]
    process.terminate()
    process.communicate(timeout=240)
    assert (model / "model.gguf").read_text("utf-8") == "converted" and not (model / ".model.gguf.part").exists()


def test_a_converter_that_fails_leaves_nothing(
    model: Path, standins: Path, unused_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (standins / "convert_hf_to_gguf.py").write_text(
        f"#!{sys.executable}\nimport sys; open(sys.argv[3], 'w').write('half'); sys.exit(3)", "utf-8"
    )
    assert run(["serve", str(model), "--backend", "llama.cpp", "--port", str(unused_port)]) == 2
    require_message(capsys.readouterr().err, model / "model.gguf", rule="3")
    assert not list(model.glob("*gguf*")) and not list(model.glob(".*"))


def test_a_server_that_exits_is_an_error(
    model: Path, standins: Path, unused_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (standins / "vllm").write_text(f"#!{sys.executable}\nraise SystemExit(7)", "utf-8")
    assert run(["serve", str(model), "--backend", "vllm", "--port", str(unused_port)]) == 2
    assert "7" in capsys.readouterr().err


def test_a_port_in_use_is_refused(model: Path, standins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = str(other.getsockname()[1])
        assert run(["serve", str(model), "--port", port]) == 2
        require_message(capsys.readouterr().err, "--port", rule=port)
        assert run(["serve", str(model), "--port", port, "--dry-run"]) == 0


def test_dry_runs_print_what_would_be_started(model: Path, standins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", str(model), "--dry-run", "--host", "::1", "--", "--seed", "1"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["HF_HUB_OFFLINE=1", str(standins / "vllm"), "serve"] and words[-2:] == ["--seed", "1"]
    assert run(["serve", str(model), "--dry-run", "--json", "--host", "::1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["backend"], found["url"], found["export"]) == ("vllm", "http://[::1]:8000", None)


def test_the_packages_are_those_that_transformers_looks_for() -> None:
    """All of them are in its extra `serving`, which ours installs."""
    from importlib.metadata import requires

    extra = [line for line in requires("transformers") or [] if 'extra == "serving"' in line]
    assert all(any(line.startswith(name) for line in extra) for name in TRANSFORMERS_NEEDS)
