"""Pages about runs: complete for every state of a run, safe for whatever a run's files say, small for long ones."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.gpu_report.report import Row
from lab.gpu_report.report import page as gpu_page
from llmrecipes.cli import app as cli
from llmrecipes.recipe.load import load, to_yaml
from llmrecipes.report import charts, comparison_page, run_page
from llmrecipes.report.records import Records
from llmrecipes.report.starts import history
from llmrecipes.rundir import Run
from llmrecipes.tracking.energy import Energy
from llmrecipes.workflow.compare import compare
from tests.refusals import refused

TOKEN = "hf_" + "a1B2" * 9
HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
BEGAN = 1_800_000_000.0


def step(number: int, at: float, loss: float | None = 5.0, **more: Any) -> dict[str, Any]:
    seconds = more.pop("step_seconds", 1.0)
    return {
        "step": number, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "consumed_samples": number,
        "consumed_tokens": 64 * number, "step_seconds": seconds, "tokens_per_second": 64 / seconds,
        "memory_bytes": 1 << 30, "skipped": False, "time": at, **more,
    }  # fmt: skip


def note(number: int, event: str, at: float, alarm: bool = False, **details: Any) -> dict[str, Any]:
    return {"step": number, "event": event, "details": details, "alarm": alarm, "time": at}


def evaluation(number: int, at: float, loss: float = 5.5) -> dict[str, Any]:
    return {"step": number, "valid_loss": loss, "valid_bits_per_byte": 2.0, "eval_seconds": 2.0, "time": at}


def make(
    runs_dir: Path, run_id: str, lines: list[dict[str, Any]], state: str = "finished", overrides: Sequence[str] = ()
) -> Path:
    """A run's directory, without a process."""
    resolved = load("gpt-tiny", list(overrides)).recipe
    run_dir = runs_dir / resolved.name / run_id
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "recipe.yaml").write_text(to_yaml(resolved))
    (run_dir / "plan.json").write_text(json.dumps({"world_size": 2, "memory": {"weights": 1 << 20, "total": 1 << 21}}))
    (run_dir / "env.json").write_text(json.dumps({"python": "3.11", "hostname": "n0"}))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {"state": state, "step": lines[-1]["step"] if lines else 0, "total": 640, "started": BEGAN}
    (run_dir / "status.json").write_text(json.dumps({**values, "updated": BEGAN + 100}))
    return run_dir


RELAID = {"layout.engine": "megatron", "layout.tensor_model_parallel_size": 2}


def interrupted() -> list[dict[str, Any]]:
    """Killed after step 6, of which steps 5 and 6 were lost; resumed after a minute."""
    lost: dict[str, Any] = {"reached_step": 6, "reached_time": BEGAN + 16}
    first = [step(n, BEGAN + 10 + n) for n in range(1, 5)]
    return [
        note(0, "started", BEGAN + 8, ranks=2, host="n0", pid=1, process_seconds=8.0,
            executed={"layout.engine": "megatron"}),
        *first,
        note(4, "checkpoint_saved", BEGAN + 14.5, seconds=0.4, loop_waited=0.1),
        note(4, "started", BEGAN + 90, ranks=2, host="n1", pid=2, process_seconds=14.0, **lost, executed=RELAID),
        *(step(n, BEGAN + 95 + n) for n in range(5, 9)),
        evaluation(8, BEGAN + 106),
    ]  # fmt: skip


class Pages(HTMLParser):
    """What a browser would see: tags with their attributes, and text outside of style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._style = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        self.words += "" if self._style else data


def written(runs_dir: Path, *arguments: str) -> str:
    """The page that a command writes."""
    out = runs_dir / "page.html"
    assert cli.run(["report", *arguments, "--out", str(out), "--runs-dir", str(runs_dir)]) == 0
    return out.read_text("utf-8")


def test_a_page_has_every_section_and_loads_nothing(tmp_path: Path) -> None:
    make(tmp_path, "one", interrupted())
    html = written(tmp_path, "one")
    page = Pages(html)
    ids = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    assert ids == ["problems", *(name for name, _, _ in run_page.SECTIONS)]
    links = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert links == {f"#{name}" for name, _, _ in run_page.SECTIONS}
    assert "default-src 'none'" in html
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "form"}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on") or name == "src"]
    assert "http:" not in html and "https:" not in html and "@import" not in html and "url(" not in html
    pictures = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("role") == "img"]
    assert len(pictures) >= 8 and all(attributes["aria-label"] for attributes in pictures)
    headings = [tag for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == "h1" and headings.count("h1") == 1
    assert "layout.tensor_model_parallel_size default → 2" in page.words


@pytest.mark.parametrize("events", [[], interrupted()])
def test_a_page_says_what_a_run_does_not_have(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    make(tmp_path, "one", events)
    page = written(tmp_path, "one")
    for name in ("stragglers", "experts", "layers", "energy", "logs"):
        section = page.split(f'<section id="{name}">')[1].split("</section>")[0]
        assert 'class="muted"' in section and "<figure" not in section, name


def test_stages_have_their_layouts_and_whether_they_have_begun(tmp_path: Path) -> None:
    run_dir = make(tmp_path, "one", [note(0, "stage", BEGAN, name="short"), step(1, BEGAN + 1)])
    plan = json.loads((run_dir / "plan.json").read_text())
    facts = {"first_step": 0, "last_step": 1200, "tokens": 4800, "layout": "tensor 2 × data 4"}
    stages = [{**facts, "name": "short"}, {"name": HOSTILE, "layout": "context 2 × data 4", "tokens": "many"}, None]
    (run_dir / "plan.json").write_text(json.dumps({**plan, "stages": stages}))
    page = written(tmp_path, "one")
    section = Pages(page.split('<section id="stages">')[1].split("</section>")[0]).words
    for words in ("tensor 2 × data 4", "context 2 × data 4", "1,200", "4,800", "yes", "no", "unknown"):
        assert words in section
    assert HOSTILE not in page


def test_starts_and_time_by_cause_add_up(tmp_path: Path) -> None:
    records = Records()
    for line in interrupted():
        records.add(line)
    past = history(records, None)
    assert [(s.from_step, s.to_step, s.repeated, s.host, s.ranks) for s in past.starts] == [
        (0, 6, 2, "n0", 2),
        (4, 8, 0, "n1", 2),
    ]
    assert [start.changed for start in past.starts] == ["", "layout.tensor_model_parallel_size default → 2"]
    assert past.interruptions == 1
    assert past.wall == pytest.approx(106)
    assert past.causes == {
        "steps": pytest.approx(8), "evaluation": pytest.approx(2), "save": pytest.approx(0.1),
        "repeated": pytest.approx(1.5), "restart": pytest.approx(10 + 23), "waiting": pytest.approx(60),
        "other": pytest.approx(106 - 104.6),
    }  # fmt: skip
    assert past.rank_hours == pytest.approx(2 * (16 + 30) / 3600)


def test_going_back_in_the_same_process_is_not_an_interruption() -> None:
    records = Records()
    same: dict[str, Any] = {"ranks": 1, "host": "n0", "pid": 1, "process_seconds": 1.0}
    for line in (
        note(0, "started", BEGAN, **same), *(step(n, BEGAN + n) for n in range(1, 5)),
        note(4, "started", BEGAN + 9, reached_step=7, reached_time=BEGAN + 7, **same),
        note(4, "rewound", BEGAN + 9, True), step(5, BEGAN + 11),
    ):  # fmt: skip
        records.add(line)
    past = history(records, 1)
    assert [(start.rewound, start.repeated) for start in past.starts] == [(False, 3), (True, 0)]
    assert past.interruptions == 0


def test_a_run_without_notes_of_starts_shows_gaps(tmp_path: Path) -> None:
    """A run of an older version."""
    lines = [step(n, BEGAN + n) for n in range(1, 20)] + [step(n, BEGAN + 500 + n) for n in range(20, 30)]
    records = Records()
    for line in lines:
        records.add(line)
    past = history(records, None)
    assert [(start.inferred, start.from_step, start.to_step) for start in past.starts] == [
        (True, 0, 19),
        (True, 19, 29),
    ]
    assert past.causes["waiting"] == pytest.approx(500)
    assert past.rank_hours is None
    make(tmp_path, "old", lines)
    assert "inferred" in written(tmp_path, "old")


def damage(run_dir: Path, what: str) -> str:
    """Damage a run; returns a word of the page that names it."""
    if what == "no metrics":
        (run_dir / "metrics.jsonl").unlink()
        return "metrics.jsonl"
    if what == "binary metrics":
        (run_dir / "metrics.jsonl").write_bytes(
            b"\xff\x00\n" * 7 + b'{"step": 1}\n{"step": "x", "loss": 1}\n[1]\n{"ste'
        )
        return "damaged"
    if what == "a folder as metrics":
        (run_dir / "metrics.jsonl").unlink()
        (run_dir / "metrics.jsonl").mkdir()
        return "a folder"
    if what == "strange values":
        lines = [
            '{"step": 1, "loss": 1e999, "grad_norm": null, "time": "x", "experts": [1, {"layer": null}]}',
            '{"step": 1, "loss": 2, "step_seconds": 1' + "0" * 400 + ', "time": 1e300, "b": {"c": {"d": true}}}',
            '{"step": 2, "loss": 2, "step_seconds": -1, "time": -5, "experts": {"layer": 1}, "a": [[1], "x"]}',
            '{"step": 3, "event": "started", "details": {"ranks": "x", "pid": [], "process_seconds": "y"}, "time": 7}',
            '{"step": 4, "event": "checkpoint_saved", "details": {"loop_waited": "x"}}',
            '{"step": 5, "valid_loss": null, "eval_seconds": "x"}',
            '{"step": 5, "event": "tasks_evaluated", "details": {"a": "nan", "b": null}, "alarm": 7, "time": null}',
        ]
        (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return "Loss"
    name = what.split()[-1]
    (run_dir / name).write_text(
        {"truncated": '{"state": "fini', "list": "[1, 2]", "strange": "model: [\n"}[what.split()[0]]
    )
    return name if name != "status.json" else "unknown state"


@pytest.mark.parametrize(
    "what",
    [
        "no metrics", "binary metrics", "a folder as metrics", "strange values", "truncated plan.json",
        "list plan.json", "truncated env.json", "truncated status.json", "list status.json", "strange recipe.yaml",
    ],
)  # fmt: skip
def test_a_damaged_run_has_a_page_that_says_so(tmp_path: Path, what: str) -> None:
    run_dir = make(tmp_path, "one", interrupted())
    word = damage(run_dir, what)
    assert word in Pages(written(tmp_path, str(run_dir))).words


def test_text_of_a_run_is_escaped_and_has_no_secrets(tmp_path: Path) -> None:
    lines = [
        *interrupted(),
        note(8, "loss_spike", BEGAN + 101, True, text=HOSTILE, token=TOKEN),
        note(8, HOSTILE, BEGAN + 101, True, **{HOSTILE: HOSTILE}),
        note(8, "tasks_evaluated", BEGAN + 101, False, **{HOSTILE: 0.5}),
        {"step": 8, "valid_loss": 1.0, HOSTILE: {HOSTILE: 1.0}, "time": BEGAN + 101},
        {**step(9, BEGAN + 105), HOSTILE: [1, 2], "ranks": {HOSTILE: {"max": 1.0, "max_rank": 0}}},
        note(9, "started", BEGAN + 200, ranks=1, host=HOSTILE, pid=3, process_seconds=1.0),
    ]
    run_dir = make(tmp_path, "x", lines, state=HOSTILE)
    hostile = run_dir.rename(run_dir.with_name("<script>alert(3)<"))
    (hostile / "env.json").write_text(json.dumps({HOSTILE: HOSTILE, "command": ["--token", TOKEN]}))
    (hostile / "logs" / "env.until-step-00000004.json").write_text(json.dumps({HOSTILE: "other"}))
    (hostile / "plan.json").write_text(json.dumps({"memory": {HOSTILE: 5}, "degrees": {HOSTILE: 2}, "world_size": 1}))
    (hostile / "logs" / "rank-1.log").write_text(f"{HOSTILE}\n{TOKEN}\n\x1b[31mred\x00\n")
    (hostile / "logs" / "bad-nodes").write_text(HOSTILE)
    recipe = hostile / "recipe.yaml"
    recipe.write_text(
        re.sub("^description: .*$", f"description: {json.dumps(HOSTILE)}", recipe.read_text(), flags=re.M)
    )
    for html in (written(tmp_path, str(hostile)), written(tmp_path, str(hostile), str(hostile))):
        page = Pages(html)
        assert HOSTILE in page.words and TOKEN not in html
        assert not {tag for tag, _ in page.tags} & {"script", "img"}
        assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
        assert "\x00" not in html and "\x1b" not in html


def test_a_running_run_is_said_to_run_and_is_loaded_again_on_request(tmp_path: Path) -> None:
    material = run_page.Material.read(Run(make(tmp_path, "one", interrupted(), state="running")), tmp_path)
    assert material.running  # of another machine, so that nobody can see its process
    html = run_page.page(material, 30)
    assert 'http-equiv="refresh" content="30"' in html and "still running" in html
    assert "refresh" not in run_page.page(material)


def test_numbers_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    lines = [step(n, BEGAN + n, None if n == 3 else 2.0) for n in range(1, 6)]
    make(tmp_path, "one", lines)
    assert "1 values are not finite" in written(tmp_path, "one")


def test_experts_layers_and_ranks_are_drawn(tmp_path: Path) -> None:
    def balance(n: int) -> list[dict[str, Any]]:
        return [{"layer": layer, "tokens_per_expert": [n, 0, 8], "imbalance": 1.5, "dropped": 1, "entropy": 0.5}
                for layer in (1, 2)]  # fmt: skip

    def histograms(n: int) -> dict[str, Any]:
        bins = {"low": -10, "negative": [n, 0], "zero": 9, "positive": [1, 4]}
        return {"gradient": {"mlp_fc1": bins, "norm": bins | {"low": "x"}}, "weight": {"embedding": bins}}

    lines = [
        step(n, BEGAN + n, experts=balance(n), token_accuracy=0.125 * n,
             layers={"attention_logit": {"max": [2.0 * n, None]}}, histograms=histograms(n),
             source_loss={f"s{source:02}": 1.0 + n for source in range(20)},
             norms={"gradient": [0.1 * n, None]}, updates={"layer_01/q": 0.5 * n},
             nodes={"power_watts": {"min": 1.0, "median": 2.0, "max": 3.0, "min_node": "n0", "max_node": "n9"}},
             energy={"joules": 0.9e6, "tokens_per_joule": 7.5, "method": "nvml"},
             ranks={"compute_seconds": {"min": 1.0, "median": 1.5, "max": 2.0, "min_rank": 0, "max_rank": 7}})
        for n in range(1, 4)
    ]  # fmt: skip
    make(tmp_path, "one", lines)
    html = written(tmp_path, "one")
    for name, *shown in (
        ("loss", "Tokens predicted correctly, share", "training: first 0.125, last 0.375"),
        ("loss", "Training loss by source, nats a token", "s11: first 2, last 4", "The first 12 of 20 by name"),
        ("experts", "layer 1: 1 of 3, layer 2: 1 of 3"),
        ("layers", "Norms, gradient", "Updates, q", "Layers, attention logit, max"),
        (
            "layers",
            "Gradients by size at step 3, share of each kind",
            "mlp fc1",
            "Weights by size, share of all",
            "2^-9",
        ),
        ("stragglers", "rank 7", "Compute"),
        ("nodes", "n9", "Power, W"),
        ("energy", "0.75 kWh", "measured by nvml", "Tokens per joule"),
    ):
        section = html.split(f'<section id="{name}">')[1].split("</section>")[0]
        assert "<svg" in section and all(words in section for words in shown), (name, section)


@pytest.mark.parametrize("count", ['"x"', "null", "[]"])
def test_a_damaged_load_of_an_expert_is_not_that_of_a_step_before(tmp_path: Path, count: str) -> None:
    balance = [{"layer": 1, "tokens_per_expert": [1, 7], "imbalance": 1.5}]
    lines = [step(n, BEGAN + n, experts=balance) for n in (1, 2)]
    damaged = json.loads(json.dumps(lines[1]).replace("[1, 7]", f"[1, {count}]"))

    def pictures(name: str) -> int:
        section = written(tmp_path, name).split('<section id="experts">')[1].split("</section>")[0]
        return section.count("<svg")

    make(tmp_path, "whole", lines)
    make(tmp_path, "damaged", [lines[0], damaged])
    assert pictures("damaged") == pictures("whole") - 1


def test_steps_are_divided_by_what_their_ranks_did() -> None:
    records = Records()
    for name, seconds in (("compute", 3.0), ("communication", 1.0), ("data", 0.0)):
        records.add(step(1, BEGAN, step_seconds=8.0, ranks={f"{name}_seconds": {"median": seconds}}))
    causes = history(records, 1).causes
    assert causes["compute"] == pytest.approx(18) and causes["communication"] == pytest.approx(6)
    assert "steps" not in causes


def test_prices_and_power_of_a_profile_are_used(tmp_path: Path) -> None:
    run = Run(make(tmp_path, "one", interrupted()))
    from llmrecipes.hardware.profile import Costs

    costs = Costs(usd_per_gpu_hour=2.0, watts_per_gpu=1000.0, pue=1.5, kg_co2_per_kwh=0.5)
    words = Pages(run_page.report(run, tmp_path, costs)[0]).words
    hours = 2 * 46 / 3600
    for text in (f"{2 * hours:.2f} USD", f"{1.5 * hours:.3g} kWh", f"{0.75 * hours:.3g} kg"):
        assert text in words


def test_recorded_energy_is_shown_and_compared_by_the_factors_of_a_profile_that_is_named(tmp_path: Path) -> None:
    from llmrecipes.hardware.profile import Costs

    recorded = Energy().plus(3.6e6, ["nvml"], Costs(kg_co2_per_kwh=0.5)).plus(7.2e6, ["codecarbon"], None)
    lines = [*interrupted(), {"step": 99, "time": BEGAN + 99, "event": "energy", "details": recorded.details(10)}]
    one, two = (Run(make(tmp_path, name, each)) for name, each in (("one", lines), ("two", interrupted())))
    html, material = run_page.report(one, tmp_path)
    section = html.split('<section id="energy">')[1].split("</section>")[0]
    assert "3 kWh" in section and "measured by nvml, modelled by codecarbon" in section
    assert "CO₂" not in section, "the factor of a start is not known"
    assert run_page.as_dict(material)["energy"] == recorded.values()
    costs = Costs(watts_per_gpu=1000.0, pue=1.5, kg_co2_per_kwh=0.5)
    assert "2.25 kg" in Pages(run_page.report(one, tmp_path, costs)[0]).words
    page = Pages(comparison_page.report([one.path, two.path], tmp_path, costs)[0]).words
    assert "energy, kWh" in page and "estimated from a cluster profile" in page
    assert "3 kWh" in Pages(run_page.report(one, tmp_path, Costs(usd_per_gpu_hour=2.0))[0]).words, (
        "a price changes no energy"
    )
    page = Pages(comparison_page.report([one.path, two.path], tmp_path)[0]).words
    assert "energy, kWh" in page and "estimated" not in page
    assert "energy, kWh" not in Pages(comparison_page.report([two.path, two.path], tmp_path)[0]).words


def test_a_comparison_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "one", interrupted())
    make(tmp_path, "two", [step(n, BEGAN + n, 4.0) for n in range(1, 9)], overrides=("optimizer.lr=0.5",))
    page = Pages(written(tmp_path, "one", "two"))
    assert "optimizer.lr" in page.words and "0.5" in page.words
    capsys.readouterr()
    out = tmp_path / "json.html"
    assert cli.run(["report", "one", "two", "--json", "--out", str(out), "--runs-dir", str(tmp_path)]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["page"] == str(out) and [run["figures"]["loss"] for run in values["runs"]] == [5.0, 4.0]


def test_a_comparison_has_what_there_is(tmp_path: Path) -> None:
    make(tmp_path, "one", interrupted())
    make(tmp_path, "new", [], state="running")
    (make(tmp_path, "bad", interrupted()) / "recipe.yaml").write_text("model: [")
    (make(tmp_path, "torn", []) / "metrics.jsonl").write_bytes(b"\xff\x00{\n[]\n")
    page = Pages(written(tmp_path, "one", "new", "bad", "torn")).words
    problems = page.split("What looks wrong")[1].split("Figures")[0]
    assert "no step yet" in problems and "recipe.yaml" in problems and "2 lines are damaged" in problems
    one, new = (Run.find(name, tmp_path).path for name in ("one", "new"))
    with refused(new):  # on a terminal there would be no curves
        compare([one, new])


def test_json_has_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make(tmp_path, "one", [*interrupted(), note(8, "hang", BEGAN + 110, True, text="rank 3")])
    assert cli.run(["report", "one", "--json", "--runs-dir", str(tmp_path)]) == 0
    values = json.loads(capsys.readouterr().out)
    assert Path(values["page"]) == run_dir / "report.html" and (run_dir / "report.html").is_file()
    assert (values["state"], values["step"], len(values["starts"])) == ("finished", 8, 2)
    assert [finding["rule"] for finding in values["findings"]] == ["hang"]
    assert sum(values["seconds"].values()) == pytest.approx(2 * values["seconds"]["wall"])


def test_what_cannot_be_done_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "one", interrupted())
    assert cli.run(["report", "one", "--out", str(tmp_path / "no" / "x.html"), "--runs-dir", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err
    assert cli.run(["report", "none", "--runs-dir", str(tmp_path)]) == 2
    assert cli.run(["report", "one", "one", "--watch", "--runs-dir", str(tmp_path)]) == 2
    assert cli.run(["report", *["one"] * 7, "--runs-dir", str(tmp_path)]) == 2


def test_a_finished_run_that_is_worse_than_guessing_is_not_well(tmp_path: Path) -> None:
    for name, loss in (("good", 5.0), ("bad", 12.0)):
        lines = [step(n, BEGAN + n, loss) for n in range(1, 31)]
        make(tmp_path, name, lines, overrides=["train.train_iters=30", "scheduler.lr_warmup_iters=5"])
        words = Pages(written(tmp_path, f"gpt-tiny/{name}")).words
        assert ("The run is finished, but not well" in words) == (name == "bad")
        assert ("Its result is in doubt: worse than guessing" in words) == (name == "bad")


def test_a_long_run_has_a_small_page_and_keeps_its_spikes() -> None:
    records = Records()
    for n in range(1, 20_001):
        records.add(step(n, BEGAN + n, 9.0 if n == 12_345 else 3 + math.sin(n)))
    import numpy as np

    drawn = charts.curves("Loss", [charts.Line("loss", np.array(records.steps, float), records["loss"])])
    assert len(drawn) < 40_000
    assert "most 9" in drawn
    tops = [float(at) for at in re.findall(r" ([\d.]+)", re.findall(r'class="band f0" d="M([^"]*)"', drawn)[0])]
    assert min(tops) < 0.7 * sorted(tops)[5]  # the spike is drawn, far above all others


def test_a_diverged_run_does_not_flatten_the_others() -> None:
    at = np.arange(100.0)
    falling = charts.Line("good", at, 8 - 4 * at / 100)
    drawn = charts.curves("Loss", [falling, charts.Line("diverged", at, 8 + 3 * at)])
    path = re.findall(r'class="line s0" d="M([^"]*)"', drawn)[-1]
    heights = [float(each) for each in path.split()[1::2]]
    assert max(heights) - min(heights) > charts.HEIGHT / 4
    assert "98 values above 12 are cut off; the largest is 305." in drawn


def test_a_watched_page_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make(tmp_path, "one", interrupted(), state="running")
    status = json.loads((run_dir / "status.json").read_text())

    def sleep(seconds: float) -> None:
        (run_dir / "status.json").write_text(json.dumps({**status, "state": "finished"}))

    monkeypatch.setattr(time, "sleep", sleep)
    assert cli.run(["report", "one", "--watch", "--runs-dir", str(tmp_path)]) == 0
    assert "refresh" not in (run_dir / "report.html").read_text()


def test_the_page_of_a_gpu_report_is_escaped_too() -> None:
    page = Pages(gpu_page([Row(stage="right", item=HOSTILE, quantity="q", status="failed", note=TOKEN)], [HOSTILE]))
    assert HOSTILE in page.words and TOKEN not in page.words
    assert "script" not in {tag for tag, _ in page.tags}


def test_the_line_of_a_long_curve_is_the_median_of_each_column() -> None:
    y = np.array([3.0, 1.0, 2.0, 9.0, 7.0, 5.0])
    assert charts._medians(y, np.array([0, 3, 5])) == [2.0, 8.0, 5.0]
