"""The report of a search and optuna-dashboard, as Chromium shows them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState, create_trial

from llmrecipes.cli.app import run
from llmrecipes.launch.base import JobState, JobStatus
from llmrecipes.recipe.schema import Recipe
from llmrecipes.search.study_report import plots, write_report
from llmrecipes.search.trials import own_trials
from llmrecipes.search.worker import Worker
from tests.helpers import write_recipe
from tests.unit.search_lab import LR, Curves, bowl, curves, searched, worker

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

__all__ = ["curves"]

pytestmark = pytest.mark.usefixtures("curves")
SPACE = (
    LR,
    {"key": "model.num_attention_heads", "choices": [4, 3, 2]},
    {"key": "model.gated_linear_unit", "choices": [False, True]},
    {"key": "model.ffn_hidden_size", "choices": [64, 128], "when": {"model.gated_linear_unit": [True]}},
)
EVIL = "</script><script>owned = 1</script><img src=x onerror='owned = 1'><b>&{0}"
DRAWN = "return [...document.querySelectorAll('.js-plotly-plot')].filter(plot => plot.querySelector('.trace')).length"
COUNTS = """
const plots = {};
for (const section of document.querySelectorAll("section")) {
    const count = selector => section.querySelectorAll(selector).length;
    plots[section.querySelector("h2").textContent] = {
        points: count(".scatterlayer path.point"), lines: count(".scatterlayer path.js-line"),
        bars: count(".barlayer .point > path"),
        axes: [...section.querySelectorAll(".xtick text, .xtitle, .ytitle")].map(text => text.textContent),
    };
}
return plots;
"""


def visit(browser: Chrome, address: str, width: int) -> None:
    """Open a page in a window of so many pixels."""
    for log in ("browser", "performance"):
        browser.get_log(log)  # of the page before
    view = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", view)
    browser.get(address)


def opened(browser: Chrome, path: Path, expected: int, width: int = 1280) -> dict[str, dict[str, Any]]:
    """What the plots of a report show, by heading, once all are drawn; nothing else was loaded and no script failed."""
    from selenium.webdriver.support.wait import WebDriverWait

    visit(browser, path.as_uri(), width)
    WebDriverWait(browser, 60).until(lambda page: page.execute_script(DRAWN) == expected)
    assert browser.get_log("browser") == []
    assert requests(browser) == [path.as_uri()]
    found: dict[str, dict[str, Any]] = browser.execute_script(COUNTS)
    return found


def requests(browser: Chrome) -> list[str]:
    """Addresses that the page has asked for; images within it are none."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]
    return [address for address in sent if not address.startswith(("data:", "blob:"))]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A study with trials that were complete, pruned, diverged, infeasible and failed."""

    def loss(recipe: Recipe, evaluation: int) -> float | JobStatus:
        if len(Curves.submitted) == 4:
            return JobStatus(JobState.FAILED, 137, "killed")
        if recipe.optimizer.lr > 0.5:
            return float("nan")
        return bowl(recipe, evaluation) + (recipe.model.num_attention_heads == 2) - 0.1 * recipe.model.gated_linear_unit

    monkeypatch.setattr(Curves, "loss", staticmethod(loss))
    points = [
        {"optimizer.lr": 1e-2, "model.num_attention_heads": 3, "model.gated_linear_unit": False},
        {"optimizer.lr": 1e-2, "model.num_attention_heads": 4, "model.gated_linear_unit": False},
        {"optimizer.lr": 0.9, "model.num_attention_heads": 4, "model.gated_linear_unit": False},
    ]
    pruner = {"type": "MedianPruner", "n_startup_trials": 2}
    found = worker(searched(*SPACE, n_trials=12, pruner=pruner, enqueue_trials=points), tmp_path)
    found.run()
    outcomes = {trial.user_attrs["outcome"] for trial in found.study.trials}
    assert outcomes == {"complete", "pruned", "diverged", "infeasible", "failed"}
    return found


def test_the_report_shows_the_best_trial_and_every_plot(
    made: Worker, tmp_path: Path, browser: Chrome, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, runs = write_recipe(made.recipe, tmp_path), tmp_path / "runs"
    assert run(["search", recipe, "--report", "--json", "--runs-dir", str(runs)]) == 0
    path = Path(json.loads(capsys.readouterr().out)["report"])
    found = opened(browser, path, 6)
    study, trials = made.study, made.study.trials
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    keys = {key for each in complete for key in each.params}
    assert found["History of valid_loss"]["points"] == len(complete)
    assert found["Importance for valid_loss"]["bars"] == len(keys)
    assert found["Parallel coordinates, valid_loss"]["lines"] == len(complete)
    with_key = sum(key in each.params for each in complete for key in keys)
    assert found["Slices, valid_loss"]["points"] == with_key
    with_curve = [trial for trial in trials if trial.intermediate_values]
    assert found["Learning curves"]["lines"] == len(with_curve)
    assert found["Learning curves"]["points"] == sum(len(each.intermediate_values) for each in with_curve)
    assert found["Timeline"]["bars"] == len(trials)
    # Optuna sorts the axes; each has the whole name of its key.
    axes = found["Parallel coordinates, valid_loss"]["axes"]
    assert axes == ["valid_loss[nats/token]", *sorted(keys)]

    best = study.best_trial
    [headline] = browser.find_elements("css selector", ".headline")
    assert f"{best.value:.5g}" in headline.text
    assert f"trial {best.number}" in headline.text
    rows = dict(line.rsplit(" ", 2)[:2] for line in browser.find_element("css selector", "table.best").text.split("\n"))
    assert rows["optimizer.lr"] == f"{best.params['optimizer.lr']:.5g}"
    command = browser.find_element("css selector", "pre").text
    assert f"train {runs}/lab-search/lab/lab-best.yaml" in command
    facts = browser.find_element("css selector", "table.facts").text
    assert re.search(rf"{len(complete)} complete.*1 failed", facts)
    assert len(browser.find_elements("css selector", "table.trials tr")) == 1 + len(list(own_trials(study)))

    opened(browser, path, 6, width=400)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400


def test_no_name_in_a_study_becomes_part_of_the_page(made: Worker, tmp_path: Path, browser: Chrome) -> None:
    choices = CategoricalDistribution([EVIL, "b"])
    for choice in (EVIL, "b"):
        made.study.add_trial(
            create_trial(
                params={"optimizer.lr": 0.01, f"model.{EVIL}": choice},
                distributions={"optimizer.lr": FloatDistribution(1e-4, 1.0, log=True), f"model.{EVIL}": choices},
                value=1.0, user_attrs={"outcome": EVIL, "reason": EVIL}, intermediate_values={1: 2.0, 2: 1.0},
            )
        )  # fmt: skip
    path = tmp_path / "evil.html"
    recipe = made.recipe.model_copy(update={"name": EVIL})
    write_report(made.study, recipe, path, [EVIL])
    opened(browser, path, 6)
    assert browser.execute_script("return typeof owned") == "undefined"
    assert browser.find_elements("css selector", "img") == []
    assert browser.find_element("css selector", "pre").text == EVIL
    assert EVIL in browser.find_element("css selector", "table.best").text


def test_the_report_of_few_trials_and_of_several_objectives(tmp_path: Path, browser: Chrome) -> None:
    single = searched(LR, SPACE[2], n_trials=1)
    several = searched(LR, SPACE[2], n_trials=5, objectives=["valid_loss", "num_parameters"], study_name="several")
    for recipe in (single, several):
        study = worker(recipe, tmp_path)
        if recipe is single:
            write_report(study.study, recipe, tmp_path / "none.html")
            assert opened(browser, tmp_path / "none.html", 0).keys() == {"Study", "Trials"}
        study.run()
        write_report(study.study, recipe, tmp_path / "report.html")
        expected = plots(study.study)
        found = opened(browser, tmp_path / "report.html", len(expected))
        assert found.keys() == {"Study", *(plot.title for plot in expected), "Trials"}
        if recipe is single:
            assert found["Learning curves"]["lines"] == 1
        else:
            assert found["Trade-offs"]["points"] == 5


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is in use."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_the_dashboard_shows_the_study_until_ctrl_c(made: Worker, tmp_path: Path, taken: int, browser: Chrome) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    command = [sys.executable, "-m", "llmrecipes.cli", "search", write_recipe(made.recipe, tmp_path), "--ui"]
    command += ["--port", str(taken), "--runs-dir", str(tmp_path / "runs")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"(http://127\.0\.0\.1:(\d+))/\S+", process.stdout.readline())
        assert found is not None, process.communicate(timeout=10)
        address = found[1]
        assert int(found[2]) != taken
        listening = [
            connection.laddr.ip
            for child in psutil.Process(process.pid).children(recursive=True)
            for connection in child.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening == ["127.0.0.1"]
        visit(browser, found[0], 1280)
        body = browser.find_element("css selector", "body")
        WebDriverWait(browser, 60).until(lambda _: re.search(r"\blab\b", body.text))
        assert [each for each in browser.get_log("browser") if each["level"] == "SEVERE"] == []
        assert all(request.startswith(address) for request in requests(browser))
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(address, timeout=5)  # noqa: S310 - our own address
    finally:
        process.kill()
