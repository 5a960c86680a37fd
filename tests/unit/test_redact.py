"""Secrets stay out of everything a run prints, writes and sends; ordinary text stays as it is."""

from __future__ import annotations

import codecs
import io
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from llmrecipes import console
from llmrecipes.errors import UserError
from llmrecipes.evaluation.history import append, read, records
from llmrecipes.evaluation.request import EvaluationResult
from llmrecipes.recipe.load import load
from llmrecipes.redact import HIDDEN, Guarded, address, escape, has_secret, redact, redacted, remember
from llmrecipes.search.command import quiet
from llmrecipes.search.starting import REASON
from llmrecipes.search.study import open_study, place_of, require_section
from llmrecipes.search.study_report import write_report
from llmrecipes.search.trials import return_to_queue
from llmrecipes.tracking.run_environment import capture
from tests.helpers import ROOT, tiny, tiny_on, write_recipe
from tests.refusals import refused

NAMES = (
    "HF_TOKEN", "GITHUB_TOKEN_RO", "WANDB_API_KEY", "SIGNING_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "CLIENT_SECRET", "SECRET_OF_MINE", "PGPASSWORD", "DB_PASSWORD_PROD", "KEY_PASSPHRASE",
    "MY_CREDENTIALS_JSON", "NCCL_AUTH_TOKEN", "SLURM_JWT",
)  # fmt: skip
URLS = {
    "TORCH_PROXY": "http://u:{}@proxy.corp:3128",
    "GLOO_PROXY": "http://u:{}@[::1]:3128/",
    "SLURM_INDEX": "https://{}@index.example.org/simple",
    "OMP_STORE": "https://store.example.org/?token={}&region=eu",
    "CUDA_BUCKET": "https://bucket.example.org/a?X-Amz-Credential=AK&X-Amz-Signature={}",
    "NVTE_BLOB": "https://blob.example.org/a?sv=2024&sig={}",
    "MKL_DATABASE": "postgresql://me:{}@db.example.org/runs",
    "SLURM_KEYED": "https://api.example.org/v1?api_key={}#top",
}
CANARIES = {name: f"Canary{number:02}of30" for number, name in enumerate([*NAMES, *URLS])}
VARIABLES = {name: URLS.get(name, "{}").format(canary) for name, canary in CANARIES.items()}
NUMBERS = (
    "train.train_iters", "train.seed", "layout.micro_batch_size", "train.global_batch_size", "train.eval_interval",
    "train.eval_iters", "train.log_interval", "model.num_layers", "model.hidden_size", "model.ffn_hidden_size",
    "model.num_attention_heads", "model.num_query_groups", "model.kv_channels", "model.seq_length", "model.vocab_size",
    "optimizer.lr", "optimizer.weight_decay", "scheduler.lr_warmup_iters", "checkpoint.save_interval",
    "checkpoint.most_recent_k", "data.num_workers", "data.prefetch_factor", "layout.tensor_model_parallel_size",
)  # fmt: skip
"""Keys that refuse text, and quote it."""

# Runs as `llmrecipes`, with a library that talks: everything it knows is printed, logged, noted and raised.
TALKATIVE = """
import json, logging, sys, time, warnings
from pathlib import Path
from llmrecipes.cli import app
from llmrecipes.console import console
from llmrecipes.redact import guard_streams
from llmrecipes.tracking.events import Note
from llmrecipes.train.loop import Loop

text, runs_dir, commands = (json.loads(sys.argv.pop(1)) for _ in range(3))

def talk(loop, progress):
    loop.tracker.note(Note(step=0, event="library_error", details={"text": text, "all": [text]}, alarm=True))
    logging.getLogger("library").warning(text)
    warnings.warn(text)
    console().print(text)
    print(text)
    known = Path(runs_dir, "canary", "r", "mlflow.json")
    while not known.exists() or "run_id" not in known.read_text():  # MLflow's process is still starting
        time.sleep(0.05)
    raise ValueError(text)

Loop.run = talk
guard_streams()
for command in commands:
    assert app.run(command) in (0, 2), command
app.main()
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory, corpus: Path, data_dir: Path) -> dict[str, bytes]:
    """Everything that a run with a secret in each variable leaves, by place: terminal and files."""
    folder = tmp_path_factory.mktemp("secrets")
    # A secret in a recipe that is no URL cannot be refused; what is recorded hides it.
    recipe = tiny_on(corpus, "canary", train={"global_batch_size": 16}, tracking={"mlflow": True, "tensorboard": True})
    path = write_recipe(recipe.model_copy(update={"description": f"of {CANARIES['HF_TOKEN']}"}), folder)
    text = " and ".join([*VARIABLES.values(), *CANARIES.values()])
    profile = ["--cluster", "h100-ib", "--dry-run", "--runs-dir", "/tmp/runs", "--data-dir", "/tmp/data"]
    image = ["--image", f"ghcr.io/me/llmrecipes@sha256:{'7' * 64}"]
    wrong = [f"{key}={value}" for key, value in zip(NUMBERS, CANARIES.values(), strict=True)]
    commands = [
        ["submit", path, "--to", "slurm", *profile],
        ["submit", path, "--to", "k8s", *image, *profile],
        ["submit", path, "--to", "k8s", "--json", *image, *profile],
        ["show", path],
        ["show", path, "--json"],
        *(["show", path, f"search.storage={url}"] for url in VARIABLES.values()),
        *(["show", path, *wrong[half::2], "--json"] for half in (0, 1)),  # as many as one message names
        ["runs", "--runs-dir", VARIABLES["TORCH_PROXY"]],
    ]
    done = subprocess.run(
        [
            sys.executable, "-c", TALKATIVE, json.dumps(text), json.dumps(str(folder)), json.dumps(commands),
            "train", path, "--run-id", "r", "--no-sample", "--runs-dir", str(folder), "--data-dir", str(data_dir),
        ],
        env={**os.environ, **VARIABLES},
        capture_output=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1 and b"ValueError" in done.stderr, done.stderr.decode()[-3000:]
    Path(path).unlink()
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert {"mlflow.db", "canary/r/env.json", "canary/r/plan.json", "canary/r/recipe.yaml"} <= files.keys()
    assert b"library_error" in files["mlflow.db"] and b"library_error" in files["canary/r/metrics.jsonl"]
    assert all(f"{key}={HIDDEN}".encode() in done.stdout for key in NUMBERS)
    assert b"#SBATCH" in done.stdout or b"sbatch" in done.stdout
    assert b"kind: Job" in done.stdout
    return {"stdout": done.stdout, "stderr": done.stderr, **files}


@pytest.mark.parametrize("name", CANARIES)
@pytest.mark.rotating("secrets")  # all read what one run leaves
def test_a_secret_is_in_no_output_of_a_run(outputs: dict[str, bytes], name: str) -> None:
    canary = CANARIES[name].encode()
    assert not [place for place, content in outputs.items() if canary in content]
    assert HIDDEN.encode() in outputs["stdout"] and HIDDEN.encode() in outputs["canary/r/metrics.jsonl"]


def test_a_rank_prints_its_traceback_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "spec.json").touch()
    code = """
import os
from types import SimpleNamespace
from llmrecipes.train.rank import rank_main

def run(spec):
    raise ValueError(os.environ["TORCH_PROXY"] + os.environ["HF_TOKEN"])

rank_main(SimpleNamespace(model_validate_json=lambda text: SimpleNamespace(recipe=None)), run)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "spec.json")],
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "ValueError" in done.stderr and HIDDEN in done.stderr, done.stderr
    assert "Canary" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://u:pw@proxy:3128/x@y", "http://<hidden>@proxy:3128/x@y"),
        ("postgresql+psycopg://me:p/a@ss@host/db", "postgresql+psycopg://<hidden>@host/db"),
        ("https://x-token@github.com/a.git", "https://<hidden>@github.com/a.git"),
        ("proxy me:pw@proxy.corp:3128", "proxy <hidden>@proxy.corp:3128"),
        ("GET /api?x=1&token=abc&y=2 HTTP", "GET /api?x=1&token=<hidden>&y=2 HTTP"),
        ("(?access_token=a)", "(?access_token=<hidden>"),
        ("a?sv=1&sig=a%3D&se=2", "a?sv=1&sig=<hidden>&se=2"),
        ("export HF_TOKEN=abc", "export HF_TOKEN=<hidden>"),
        ("A_KEY='a b' B=2", "A_KEY='<hidden>' B=2"),
        ('{"HF_TOKEN": "abc"}', '{"HF_TOKEN": "<hidden>"}'),
        ("connect(password='abc')", "connect(password='<hidden>')"),
        ("Authorization: Bearer abc", "Authorization: Bearer <hidden>"),
        ("{'authorization': 'Basic dTpw'}", "{'authorization': 'Basic <hidden>'}"),
        ("curl -H 'X-Api-Key: 12345678'", "curl -H 'X-Api-Key: <hidden>'"),
        (f"cached hf_{'aB3' * 12}.", "cached <hidden>."),
        ("AKIAABCDEFGHIJKLMNOP", "<hidden>"),
    ],
)
def test_forms_of_secrets(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown
    assert json.loads(redact(json.dumps({"text": text}))) == {"text": shown}


@pytest.mark.parametrize(
    "text",
    [
        "step 20/640  loss 6.9942  lr 4.7e-03  grad 0.80  9,969 tok/s  mem 1.0 GiB  left 2m15s",
        "data is prepared in data/619f01c5c4e786c3: 17.4 MiB, 11.9 s",
        "ghcr.io/me/llmrecipes:1.0@sha256:" + "7" * 64,
        "oci://localhost:5000/me/x@sha256:abc",
        "http://127.0.0.1:5000/#/experiments?workflowType=machine_learning",
        "postgresql://me@host/db and ssh://git@host/x",
        "TOKENIZERS_PARALLELISM=false MAX_TOKENS=128 NCCL_IB_PKEY=0x8001",
        "data.tokenizer.path=gpt2 model.vocab_size=512 optimizer.lr=1e-3",
        "?max_tokens=128&step=3 KEY=VALUE X_TOKEN=$HF_TOKEN",
        "--secret HF_TOKEN=huggingface",
        "authorization: required. password: is wrong. Bearer of news",
        "me@example.org at 10:30, file.py:30: error",
    ],
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


def test_the_documentation_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):  # of whoever runs this
        if re.search("TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", name):
            monkeypatch.delenv(name)
    pages = [
        *ROOT.glob("docs/*/*.md"),
        *ROOT.glob("recipes/*.yaml"),
        *ROOT.glob("tests/golden/*.yaml"),
        ROOT / "README.md",
    ]
    changed = [
        line
        for text in (page.read_text("utf-8") for page in pages)
        for line, shown in zip(text.splitlines(), redact(text).splitlines(), strict=True)
        if line != shown and "export WANDB_API_KEY=…" not in line
    ]
    assert len(pages) > 50 and not changed


@pytest.mark.parametrize(
    "value", ['quo"te\\back', "per cent/and slash", "two\nlines of it", "It's an apostrophe", "ünïcödé-key"]
)
def test_a_value_is_hidden_in_every_spelling(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    import shlex
    from urllib.parse import quote

    monkeypatch.setenv("SOME_SECRET", value)
    for form in (value, quote(value), quote(value, safe=""), repr(value), json.dumps(value), shlex.quote(value)):
        assert redact(f"<{form}>").strip("<>\"'") in (HIDDEN.strip("<>"), HIDDEN), form


def test_values_that_are_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    path.touch()
    ordinary = {"AWS_CREDENTIALS": str(path), "GIT_AUTHOR_NAME": "Jane Doe Smith", "USE_TOKEN": "disabled",
                "SHORT_TOKEN": "loss", "AWS_REGION": "us-east-1", "KEY_FILE": "/nowhere/key.pem"}  # fmt: skip
    for name, value in ordinary.items():
        monkeypatch.setenv(name, value)
    text = " ".join(ordinary.values())
    assert redact(text) == text


def test_a_removed_or_remembered_value_stays_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOVED_TOKEN", "removed-canary")
    assert redact("x removed-canary") == f"x {HIDDEN}"
    monkeypatch.delenv("REMOVED_TOKEN")
    assert redact("x removed-canary") == f"x {HIDDEN}"
    remember("canary-of-a-file")
    assert redact("canary-of-a-file") == HIDDEN


def test_errors_log_lines_and_tables_are_redacted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-of-this-test")
    error = UserError("canary-of-this-test", where="http://u:pw@h", rule="?token=abc", fix="HF_TOKEN=abc")
    texts = [str(error), json.dumps(UserError("several", parts=[error]).as_dict()), json.dumps(error.as_dict())]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    console.setup_logging()
    try:
        raise ValueError("canary-of-this-test")
    except ValueError:
        logging.getLogger("llmrecipes").exception("%s", "http://u:pw@h")
    texts.append(capsys.readouterr().err)
    written = io.StringIO()
    monkeypatch.setattr("sys.stdout", written)
    shown = console.console.__wrapped__()
    assert isinstance(shown, Console)
    shown.width = 20  # cuts the value
    shown.soft_wrap = False
    shown.print("on this line is canary-of-this-test", markup=False)
    texts.append(written.getvalue())
    for text in texts:
        assert HIDDEN in text and "canary" not in text and "pw" not in text and "abc" not in text, text


def test_a_guarded_stream_is_the_stream() -> None:
    stream = io.StringIO()
    guarded = Guarded(stream)
    assert guarded.write("a http://u:pw@h\n") == 16 and guarded.isatty() is False
    guarded.writelines(["?token=x\n", "\n"])
    assert stream.getvalue() == f"a http://{HIDDEN}@h\n?token={HIDDEN}\n\n"


def test_nested_values_and_addresses() -> None:
    value = {"a": ["?token=x", 1, None, 2.5], "http://u:p@h": ("b", True)}
    assert redacted(value) == {"a": [f"?token={HIDDEN}", 1, None, 2.5], f"http://{HIDDEN}@h": ["b", True]}
    assert address("https://u:p@host:5000/x?any=1#y") == "https://host:5000/x"
    assert has_secret("postgresql://u:p@h") and not has_secret("postgresql://u@h/db?sslmode=require")


def test_env_json_has_no_password_of_a_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_PROXY", "http://u:pw@proxy.corp:3128")
    assert capture(tmp_path)["variables"]["TORCH_PROXY"] == f"http://{HIDDEN}@proxy.corp:3128"


def test_results_of_an_evaluation_are_kept_without_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-of-this-test")
    settings = {"dataset": "https://u:canary@h/x", "canary-of-this-test": 1}
    result = EvaluationResult("canary-of-this-test", {"loss": 1.5}, settings, ({"text": "?token=canary"},))
    append(tmp_path, records([result], 10, "canary-of-this-test/step-10"))
    assert "canary" not in (tmp_path / "evaluations.jsonl").read_text()
    assert [each["metrics"] for each in read(tmp_path)] == [{"loss": 1.5}]


@pytest.mark.parametrize("where", ["journal.log", "sqlite:///{}/study.db"])
@pytest.mark.rotating
def test_a_study_is_kept_and_reported_without_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    quiet()
    monkeypatch.setenv("HF_TOKEN", "canary-of-this-test")
    search = {"space": [{"key": "optimizer.lr", "low": 1e-4, "high": 1.0}], "n_trials": 2}
    storage = None if where == "journal.log" else where.format(tmp_path)
    recipe = tiny("canary", search=search | {"storage": storage})
    recipe = recipe.model_copy(update={"description": "of canary-of-this-test"})
    place = place_of(recipe, require_section(recipe), tmp_path / "runs")
    overrides = ["description=of canary-of-this-test"]
    study = open_study(recipe, place, resume=False, overrides=overrides)
    trial = study.ask()
    trial.set_user_attr(REASON, "refused by http://u:canary@h")
    return_to_queue(study, trial.number)
    again = open_study(recipe, place, resume=True, overrides=overrides)  # it is of the same recipe
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if b"canary-of-this-test" in path.read_bytes()]
    assert {trial.user_attrs[REASON] for trial in again.trials} == {f"refused by http://{HIDDEN}@h"}
    # One of an older version is not redacted.
    monkeypatch.setattr("llmrecipes.search.storage.redacted", lambda value: value)
    study.ask().set_user_attr(REASON, "refused by http://u:older-canary@h")
    page = tmp_path / "report.html"
    write_report(again, recipe, page)
    assert "refused by" in page.read_text() and "older-canary" not in page.read_text()


@pytest.mark.parametrize("key", ["description", "data.sources.0.path", "data.tokenizer.path", "tracking.experiment"])
def test_a_recipe_with_a_token_of_known_form_is_refused_without_it(key: str) -> None:
    with refused(key) as caught:
        load("gpt-tiny", [f"{key}=of hf_{'canary' * 6}"])
    assert "canary" not in str(caught.value)


def test_characters_that_a_stream_lacks_are_those_of_json() -> None:
    codecs.register_error("llmrecipes.escape", escape)
    for text in ("5 × 3", "naïve 中", "beyond the first plane 🙂", "a name that is no text \udcff"):
        shown = text.encode("ascii", "llmrecipes.escape").decode("ascii")
        assert json.loads(f'"{shown}"') == text
    assert "中\udcff".encode("utf-8", "llmrecipes.escape").decode() == "中\\udcff"


@pytest.mark.parametrize("key", ["data.sources.0.path", "data.tokenizer.path", "search.storage"])
@pytest.mark.parametrize("url", ["postgresql://me:{}@host/db", "postgresql://host/db?password={}"])
def test_a_recipe_with_a_secret_is_refused_without_it(key: str, url: str) -> None:
    more = ["search={n_trials: 1, space: [{key: optimizer.lr, low: 1.0e-4, high: 1.0e-2}]}"] if "search" in key else []
    with refused(key) as caught:
        load("gpt-tiny", [*more, f"{key}={url.format('canary')}"])
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    "piece", ["a", "a:", "@", "a@", "A=&", "://a:x/@", "?a=b", "A='", "http://a", "authorization:"]
)
def test_long_lines_take_linear_time(piece: str) -> None:
    def seconds(times: int) -> float:
        started = time.process_time()
        redact("@" + piece * times)
        return time.process_time() - started

    seconds(10)
    assert seconds(40_000) < 1.0  # what is quadratic takes minutes


def test_a_log_line_goes_to_what_standard_error_is_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Notebooks and tests replace it, and close the one before."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    before = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", before)
        console.setup_logging()
    before.close()
    line = "to the new one"
    logging.getLogger("llmrecipes").warning(line)
    assert line in capsys.readouterr().err


def test_a_closed_stream_takes_what_is_printed() -> None:
    code = "import sys; from llmrecipes.redact import guard_streams as g; g(); print(1); print(1, file=sys.stderr)"
    code += "; sys.stdout.flush(); sys.stderr.flush()"
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        subprocess.run(["/bin/sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code], check=True)
