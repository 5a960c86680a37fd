"""The dashboard that is shipped asks for what a run serves, in fields that Grafana knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from llmrecipes.tracking.prometheus import in_base_units
from llmrecipes.train.observers.node_monitor import GAUGES
from llmrecipes.train.observers.telemetry import MEMORY
from tests.dashboard import ON_GPUS, dashboard, expressions, metrics_of, served, text


@pytest.mark.slow
def test_a_run_serves_all_that_the_dashboard_asks_for(tmp_path: Path, corpus: Path, data_dir: Path) -> None:
    with served(tmp_path, corpus, data_dir) as port:  # waits until it does
        page = text(port)
    assert 'llmrecipes_events_total{alarm="false",event="started",run="served/one"} 1.0' in page
    assert 'llmrecipes_steps{run="served/one"} 1e+06' in page
    wanted = set().union(*map(metrics_of, expressions()))
    there = {line.split("{")[0] for line in page.splitlines() if not line.startswith("#")}
    assert wanted - there == ON_GPUS, "none of them without a GPU, and all others"


def test_what_only_gpus_have_is_named_as_they_are_served() -> None:
    """`llmrecipes_mfu_ratio` is a field of each step."""
    names = {f"llmrecipes_node_{in_base_units(name)[0]}" for name in GAUGES}
    names |= {f"llmrecipes_rank_{name}" for name in MEMORY} | {"llmrecipes_mfu_ratio"}
    assert names >= ON_GPUS


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    """Its types drop what they do not know."""
    register_default_plugins()
    shipped = dashboard()
    assert list(lost(shipped, json.loads(JSONEncoder().encode(Dashboard.from_json(shipped))), "")) == []
    wrong = {**shipped, "panels": [{**shipped["panels"][0], "titel": "a"}]}
    assert list(lost(wrong, json.loads(JSONEncoder().encode(Dashboard.from_json(wrong))), "")) == ["/panels/0/titel"]
    places = [tuple(panel["gridPos"].values()) for panel in shipped["panels"]]
    assert len(set(places)) == len(places) and all(x + width <= 24 for x, _, width, _ in places)
    assert len({panel["id"] for panel in shipped["panels"]}) == len(places)


def lost(one: Any, other: Any, path: str) -> Iterator[str]:
    """Where the second lacks what the first has."""
    if isinstance(one, dict):
        for key, value in one.items():
            if isinstance(other, dict) and key in other:
                yield from lost(value, other[key], f"{path}/{key}")
            else:
                yield f"{path}/{key}"
    elif isinstance(one, list):
        for place, value in enumerate(one):
            yield from lost(value, other[place], f"{path}/{place}")
    elif one != other:
        yield path
