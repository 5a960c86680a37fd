"""The time model beside measured runs: a prediction for every row of a CSV file, and errors by source and group.

    python benchmarks/planner.py benchmarks/data/planner/published_runs.csv [--json OUT]

A row is a run: shapes, layout, GPU; names as in Megatron's arguments. Its own figures (throughput, MFU, memory) are
never used for its prediction. What a row leaves open is assumed, and listed. A group is one model on one type and
number of GPUs with one batch; its rank correlation is Spearman's between predicted and measured throughput, its regret
what the layout predicted best costs against the best measured one.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.plan.speed import memory_formula
from llmrecipes.plan.speed.choice import ALIKE
from llmrecipes.plan.speed.device import Device, Stack, device, kernels_on, stack
from llmrecipes.plan.speed.step import predict
from llmrecipes.plan.speed.work import Work

Row = dict[str, str]
_SURE = 0.62
"""Share of a formula's memory that a run of any framework needs."""
_FULL = 0.942
"""Share of the capacity that a program can use: the rest is the CUDA context's and the communicators'."""

# Shapes of published models, for rows that have a name only: layers, hidden, FFN, heads, groups, vocabulary, gated.
_KNOWN = {
    "gpt3-126m": (12, 768, 3072, 12, 12, 50304, False),
    "gpt3-5b": (24, 4096, 16384, 32, 32, 50304, False),
    "gpt3-20b": (44, 6144, 24576, 48, 48, 50304, False),
    "gpt3-175b": (96, 12288, 49152, 96, 96, 50304, False),
    "llama2-34b": (48, 8192, 22016, 64, 8, 32000, True),
    "nemotron-8b": (32, 4096, 16384, 32, 32, 256000, False),
    "internlm-7b": (32, 4096, 11008, 32, 32, 103168, True),
    "mistral-7b": (32, 4096, 14336, 32, 8, 32000, True),
    "llama-3.1-405b": (126, 16384, 53248, 128, 8, 128256, True),
    "grok1": (64, 6144, 32768, 48, 8, 131072, True),
    "llama4-maverick": (48, 5120, 8192, 40, 8, 202048, True),
    "nemotron-h-56b": (54, 8192, 32768, 64, 8, 131072, False),
    "nemotron-3-nano-4b": (32, 3072, 12288, 32, 8, 131072, False),
    "llama-1b": (16, 2048, 8192, 32, 32, 131072, True),
    "llama-3b": (28, 3072, 8192, 32, 32, 131072, True),
    "llama-8b": (32, 4096, 14336, 32, 32, 131072, True),
    "llama-80b": (80, 8192, 28672, 64, 64, 131072, True),
}
_SIZES = {"llama-1b": 1.34, "llama-3b": 3.57, "llama-8b": 8.86, "llama-80b": 79.99}
"""Billions of parameters, where the name is further from them than shared word embeddings are."""
_EXPERTS = {"grok1": (8, 2, 32768), "llama4-maverick": (128, 1, 8192)}
_REQUIRED = ("model", "gpus", "tp", "pp", "mbs")
_MEMORY_REQUIRED = ("suite", "test", "layers", "hidden", "mbs", "gbs", "seq")


@dataclass
class Reading:
    """A row as the model takes it."""

    work: Work
    device: Device
    stack: Stack
    assumed: list[str] = field(default_factory=list)
    partly: bool = False
    """How much is recomputed is unknown."""


@dataclass
class Result:
    """What is predicted of a row, and what was measured."""

    index: int
    group: tuple[str, ...]
    source: str
    tokens: float | None
    bytes: float | None
    fits: bool
    refused: str | None
    assumed: list[str]
    measured: float | None
    measured_bytes: float | None
    mfu: float | None
    parameters: int = 0
    complexity: tuple[int, int] = (1, 1)
    """Ranks of a replica, and chunks of a stage."""


_MOST = 1e8
"""Largest entry of a column that is believed."""
_MOST_BY_COLUMN = {
    "layers": 2048, "gbs": 1e12, "grad_acc": 1e12, "params_b": 1e6, "mem_max_bytes": 1e15
}  # fmt: skip
_MOST_SIMULATED = 512
"""Chunks of a pipeline beyond which its step is bounded instead of simulated pass by pass."""


def number(row: Row, *names: str) -> float | None:
    """The first of some columns that has a positive number of a possible size."""
    for name in names:
        text = (row.get(name) or "").strip()
        try:
            value = float(text)
        except ValueError:
            continue
        if 1e-6 <= value <= _MOST_BY_COLUMN.get(name, _MOST):
            return value
    return None


def whole(row: Row, *names: str) -> int | None:
    """The same as an integer of at least one."""
    value = number(row, *names)
    return None if value is None else max(1, int(value))


def _shape(row: Row, assumed: list[str]) -> dict[str, Any]:
    """Layers, widths and heads; by the model's name, else by its number of parameters, where the row has none."""
    name = (row.get("model") or row.get("test") or "").lower().replace("_", "-")
    known = next((shape for key, shape in _KNOWN.items() if key in name), None)
    size = number(row, "params_b") or next((size for key, size in _SIZES.items() if key in name), None)
    if size is None and (match := re.search(r"(\d{1,9}(?:\.\d{1,9})?)\s*([bt])\b", name)):
        size = float(match[1]) * (1000 if match[2] == "t" else 1)
    if size is not None and not 1e-6 <= size <= _MOST_BY_COLUMN["params_b"]:
        size = None
    values: dict[str, Any] = {}
    keys = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")
    for key in keys:
        values[key] = whole(row, *{"kv_heads": ("kv_heads", "kv_groups")}.get(key, (key,)))
    gated: bool | None = {"true": True, "false": False}.get((row.get("swiglu") or "").lower())
    if known:
        for key, value in zip(keys, known, strict=False):
            if values[key] is None:
                values[key] = value
                assumed.append(key)
        gated = known[6]
    if values["hidden"] is None:
        # Aspect ratio of published models: about 110 to 130 channels a layer.
        total = (size or 1.0) * 1e9
        layers = values["layers"] or max(2, round((total / (12 * 120**2)) ** (1 / 3)))
        values["layers"] = layers
        values["hidden"] = max(128, round(math.sqrt(total / (12 * layers)) / 128) * 128)
        assumed += ["layers", "hidden"]
    values["layers"] = values["layers"] or max(1, round((size or 1.0) * 1e9 / (12 * values["hidden"] ** 2)))
    if values["ffn"] is None:
        values["ffn"] = 4 * values["hidden"]
        assumed.append("ffn")
    if values["heads"] is None:
        values["heads"] = max(1, values["hidden"] // 128)
        assumed.append("heads")
    values["kv_heads"] = values["kv_heads"] or values["heads"]
    if values["vocab"] is None:
        values["vocab"] = 50304 if "gpt" in name else 32000 if "mixtral" in name else 128256
        assumed.append("vocab")
    values["size"] = size
    values["gated"] = gated
    return values


def _layout(row: Row, assumed: list[str]) -> dict[str, int]:
    degrees = {}
    for key in ("tp", "pp", "cp", "ep", "vpp", "dp"):
        degrees[key] = whole(row, key) or 0
    gpus = whole(row, "gpus") or 0
    if not gpus:
        dense = max(1, degrees["tp"]) * max(1, degrees["cp"]) * max(1, degrees["dp"])
        routed = max(1, degrees["ep"]) * (whole(row, "etp") or max(1, degrees["tp"]))
        gpus = max(1, degrees["pp"]) * math.lcm(dense, routed)
        assumed.append("gpus")
    for key in ("tp", "pp", "cp"):
        if not degrees[key]:
            degrees[key] = 1
            if key != "cp":
                assumed.append(key)
    model = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if model > gpus:
        gpus = model * max(1, degrees["dp"])
        assumed.append("gpus")
    if not degrees["dp"]:
        degrees["dp"] = max(1, gpus // model)
    degrees["ep"] = degrees["ep"] or 1
    degrees["vpp"] = degrees["vpp"] or 1
    return {**degrees, "gpus": gpus}


def read(row: Row) -> Reading:
    """A row of any of the files as work on a device.

    Raises:
        UserError: the layout is impossible.
    """
    assumed: list[str] = []
    values, degrees = _shape(row, assumed), _layout(row, assumed)
    source = row.get("source") or (
        "Megatron-LM tests" if "suite" in row else "nanotron ultrascale playbook" if "grad_acc" in row else ""
    )
    software = stack(source + " " + row.get("model", ""))
    zero = re.search(r"zero-?(\d)", source.lower())
    stage = int(zero[1]) if zero else (int(number(row, "zero") or 0) if row.get("zero") else None)
    if stage is not None and stage < 3 and not software.sharded:
        software = _with(software, zero=stage)
    if "suite" in row and (row.get("dist_opt") or "").lower() != "true":
        software = _with(software, zero=0)
    if (row.get("fsdp") or "").strip():
        software = _with(software, sharded=True)
    if degrees["vpp"] > 1 and degrees["pp"] * degrees["vpp"] > 4 * values["layers"]:
        degrees["vpp"] = max(1, values["layers"] // degrees["pp"])
        assumed.append("vpp")
    name = row.get("gpu") or "H100"
    if not row.get("gpu"):
        assumed.append("gpu")
    mbs, gbs = whole(row, "mbs") or 1, number(row, "gbs")
    if number(row, "mbs") != mbs:
        assumed.append("mbs")
    if gbs is None:
        gbs = mbs * degrees["dp"] * (number(row, "grad_acc") or 1)
        if "grad_acc" not in row:
            assumed.append("gbs")
    if software.name == "torchtitan" and degrees["pp"] > 1:
        # The batch of a rank, which torchtitan cuts into as many micro-batches as there are stages.
        mbs = max(1, mbs // degrees["pp"])
        degrees["vpp"] = 2 if "interleaved" in source.lower() else 1
        assumed.append("mbs")
    seq = whole(row, "seq")
    if seq is None:
        seq = 4096
        assumed.append("seq")
    experts = whole(row, "experts") or 0
    topk = whole(row, "topk") or (1 if experts else 0)
    expert_ffn = whole(row, "moe_ffn") or values["ffn"]
    lower = row.get("model", "").lower()
    for key, (count, chosen, width) in _EXPERTS.items():
        if key in lower:
            experts, topk, expert_ffn = count, chosen, width
    latent, dense_layers, shared, ffn, mtp = (0, 0, 0, 0, 0), 0, 0, values["ffn"], 0
    if "deepseek" in (lower + row.get("test", "").lower()) and values["hidden"] == 7168:
        latent, shared, mtp = (1536, 512, 128, 64, 128), 2048, 1 if "suite" in row else 0
        ffn, dense_layers = 18432, min(3, values["layers"] - 1)
    if "llama4" in lower:
        dense_layers, shared, ffn = values["layers"] // 2, 8192, 16384
    channels = max(1, values["hidden"] // values["heads"])
    if experts and ("qwen3" in lower) and channels < 128:
        channels = 128
    if "gpt oss" in lower:
        channels = 64
    recompute = (row.get("recompute") or "").strip().lower()
    if not recompute:
        recompute = "none"
        assumed.append("recompute")
    precision = (row.get("precision") or "bf16").lower()
    if (row.get("fp8") or "").strip():
        precision = "fp8"
    if degrees["ep"] > 1 and not experts:
        degrees["ep"] = 1
    # megatron-core splits experts as it does dense layers unless it is told otherwise; published recipes tell it.
    etp = (whole(row, "etp") or (degrees["tp"] if "suite" in row else 1)) if experts else 1
    options = [
        Work(
            layers=values["layers"], hidden=values["hidden"], ffn=ffn, heads=values["heads"],
            kv_heads=values["kv_heads"],
            vocab=-(-values["vocab"] // 128) * 128, seq=seq, gpus=degrees["gpus"], tp=degrees["tp"],
            pp=degrees["pp"], cp=degrees["cp"], dp=degrees["dp"], mbs=mbs, gbs=max(1, int(gbs)),
            head_dim=channels, gated=gated, tied=tied, experts=experts, topk=topk, moe_ffn=expert_ffn,
            shared_ffn=shared,
            dense_layers=dense_layers if experts else 0, latent=latent, mtp=mtp, vpp=degrees["vpp"], ep=degrees["ep"],
            etp=etp, precision=precision, recomputed=float(recompute == "full"),
            # Without a fused kernel, selective recomputation is that of core attention (arXiv 2205.05198).
            recomputed_modules=("core_attn",) if recompute == "selective" and not software.flash else (),
        )
        for gated in ((values["gated"],) if values["gated"] is not None else (True, False))
        for tied in (False, True)
    ]  # fmt: skip
    size = values["size"]
    if size:
        work = min(options, key=lambda option: abs(math.log(option.parameters / (size * 1e9))))
    else:
        work = next(option for option in options if not option.tied)
    if software.by_cost and not experts and work.vpp == 1 and 1 < work.pp <= work.layers:
        work = replace(work, stage_layers=tuple((layers,) for layers in by_cost(work)[0]))
    if values["gated"] is None:
        assumed.append("gated MLP")
    try:
        gpu = device(name)
    except UserError:
        # A wrong rate keeps the order of layouts; no prediction keeps nothing.
        gpu = device("A100" if re.search(r"[AV]\d00", name.upper()) else "H100")
        assumed.append(f"coefficients of {gpu.name}")
    on_gpu = kernels_on(gpu, software)
    if software.name == "default" or on_gpu is not software:
        assumed.append("software")
    return Reading(work, gpu, on_gpu, assumed, recompute not in ("none", "full") or "recompute" in assumed)


def by_cost(work: Work) -> tuple[tuple[int, ...], int]:
    """Layers of each stage where blocks are cut by parameters as nanotron does, and the stage of the output layer.

    A block goes to the present stage; the next begins where more than its share is placed
    (nanotron/models/base.py, build_model). Stages after the output layer's are empty.
    """
    layer = work.attention_parameters + work.dense_parameters
    total = layer * work.layers + work.vocab * work.hidden
    stages, stage, done = [0] * work.pp, 0, 0
    for _ in range(work.layers):
        stages[stage] += 1
        done += layer
        if done >= total * (stage + 1) / work.pp and stage + 1 < work.pp:
            stage += 1
    return tuple(stages), stage


def impossible(reading: Reading, size: float) -> str | None:
    """Why a run cannot be, if so. What a row leaves open is taken in its favour."""
    work, software = reading.work, reading.stack
    if work.pp > work.layers:
        return f"{work.pp} pipeline stages for {work.layers} layers"
    if software.by_cost and not work.experts and work.dp > 1 and work.pp - 1 - by_cost(work)[1] >= 3:
        return "the last pipeline stages have no parameters"
    if reading.partly and not software.by_cost:
        work = replace(work, recomputed=1.0)
        size = memory_formula.estimate(reading.device, software, work)
    # Only for frameworks with measured memory are formulas close enough for a verdict near the capacity. Gathered
    # inputs are kept by some of their versions only.
    sure = software.by_cost
    least = memory_formula.estimate(reading.device, _with(software, gathered=0.0), work) if sure else _SURE * size
    if least > reading.device.memory_bytes * _FULL:
        return f"needs {least / 1e9:.0f} GB"
    return None


def _with(software: Stack, **changes: Any) -> Stack:
    return Stack(**{**{name: getattr(software, name) for name in software.__dataclass_fields__}, **changes})


def source_of(row: Row) -> str:
    """What published a row, without what differs between its rows."""
    return re.split(r"[;(|]|README|\d{3,}", row.get("source") or row.get("suite") or "failed")[0].strip()[:48]


def replay(rows: list[Row], readings: list[Reading | None] | None = None) -> list[Result]:
    """A prediction for every row."""
    results = []
    for index, row in enumerate(rows):
        reading, refused = None, None
        try:
            reading = readings[index] if readings else read(row)
        except UserError as error:
            refused = str(error)
        measured, mfu = number(row, "tokens_per_s_per_gpu"), None
        held = number(row, "mem_gb_per_gpu")
        held = held * 1e9 if held else number(row, "mem_max_bytes")
        tokens = size = None
        fits, parameters, complexity = False, 0, (1, 1)
        if reading is not None:
            work = reading.work
            # What has more stages than layers is refused below, and predicted with as many.
            possible = replace(work, pp=min(work.pp, work.layers))
            many = possible.pp * possible.vpp > _MOST_SIMULATED
            step = predict(reading.device, reading.stack, possible, at_least=many).seconds
            tokens = work.gbs * work.seq / work.gpus / step
            size = memory_formula.estimate(reading.device, reading.stack, possible)
            refused = impossible(reading, size)
            fits, parameters = refused is None, work.parameters
            complexity = work.tp * work.pp * work.cp, work.vpp
            if measured is None and (seconds := number(row, "iter_s_median")):
                measured = work.gbs * work.seq / work.gpus / seconds
            if measured:
                mfu = measured * work.flops(causal=False) / reading.device.peak["bf16"]
        group = tuple(row.get(name) or "" for name in ("model", "gpu", "gpus", "gbs", "seq", "precision"))
        results.append(
            Result(
                index, group, source_of(row), tokens, size, fits, refused, reading.assumed if reading else [], measured,
                held, mfu, parameters, complexity,
            )
        )  # fmt: skip
    return results


def ranks(values: list[float]) -> list[float]:
    """Ranks from 1; equal values share theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    result = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for place in order[start:stop]:
            result[place] = (start + stop + 1) / 2
        start = stop
    return result


def spearman(first: list[float], second: list[float]) -> float:
    """Rank correlation; NaN where one of them is constant."""
    try:
        return statistics.correlation(ranks(first), ranks(second))
    except statistics.StatisticsError:
        return math.nan


def percentile(values: Iterable[float], share: float) -> float:
    """The value that a share of all is not above."""
    order = sorted(values)
    return order[min(len(order) - 1, max(0, math.ceil(share * len(order)) - 1))] if order else math.nan


def _timed(results: list[Result]) -> list[Result]:
    return [result for result in results if result.measured and result.tokens]


def error(result: Result) -> float:
    """Relative error of the predicted throughput."""
    assert result.tokens is not None
    assert result.measured
    return abs(result.tokens / result.measured - 1)


def groups(results: list[Result]) -> dict[tuple[str, ...], list[Result]]:
    """Rows that differ by their layout only, of groups with three or more."""
    found = defaultdict(list)
    for result in _timed(results):
        found[result.group].append(result)
    return {name: each for name, each in found.items() if len(each) >= 3}


def regret(group: list[Result], alike: float = 0.0) -> float:
    """Throughput that is lost by the layout that is predicted best.

    Args:
        alike: of those whose predicted times differ by less than this fraction, the simplest is taken, as by `choose`.
    """
    best = max(each.tokens or 0.0 for each in group)
    among = [each for each in group if best <= (each.tokens or 0.0) * (1 + alike)]
    return lost(min(among, key=lambda each: (each.complexity if alike else (), -(each.tokens or 0.0))), group)


def lost(chosen: Result, group: list[Result]) -> float:
    """Share of the throughput of the group's best layout that another one loses."""
    return 1 - (chosen.measured or 0.0) / max(each.measured or 0.0 for each in group)


def summary(results: list[Result]) -> dict[str, Any]:
    """Figures over all rows."""
    timed = _timed(results)
    fast = [error(each) for each in timed if (each.mfu or 0) >= 0.25]
    grouped = groups(results)
    correlations = [
        spearman([each.tokens or 0 for each in group], [each.measured or 0 for each in group])
        for group in grouped.values()
    ]
    correlations = [correlation for correlation in correlations if not math.isnan(correlation)]
    losses = [regret(group) for group in grouped.values()]
    chosen = [regret(group, ALIKE) for group in grouped.values()]
    blind = [statistics.fmean(lost(each, group) for each in group) for group in grouped.values()]
    held = [
        abs(result.bytes / result.measured_bytes - 1)
        for result in results
        if result.bytes and result.measured_bytes and result.parameters >= 5e8
    ]
    figures = {
        "rows": len(results),
        "timed": len(timed),
        "median_error": percentile(map(error, timed), 0.5),
        "p90_error": percentile(map(error, timed), 0.9),
        "spearman": spearman([each.tokens or 0 for each in timed], [each.measured or 0 for each in timed]),
        "mfu25_rows": len(fast),
        "mfu25_median_error": percentile(fast, 0.5),
        "mfu25_p90_error": percentile(fast, 0.9),
        "groups": len(grouped),
        "rank_correlation_median": percentile(correlations, 0.5),
        "regret_median": percentile(losses, 0.5),
        "regret_mean": statistics.fmean(losses) if losses else math.nan,
        "regret_max": max(losses, default=math.nan),
        "auto_regret_median": percentile(chosen, 0.5),
        "auto_regret_mean": statistics.fmean(chosen) if chosen else math.nan,
        "auto_regret_max": max(chosen, default=math.nan),
        "blind_regret_median": percentile(blind, 0.5),
        "blind_regret_mean": statistics.fmean(blind) if blind else math.nan,
        "memory_rows": len(held),
        "memory_median_error": percentile(held, 0.5),
        "memory_p90_error": percentile(held, 0.9),
        "ran_but_called_impossible": sum(1 for result in results if result.measured and not result.fits),
        "without_result_and_flagged": sum(
            not (result.measured or result.measured_bytes or result.fits) for result in results
        ),
        "refused": sum(1 for result in results if result.refused),
    }  # fmt: skip
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in figures.items()}


def table(results: list[Result]) -> Iterable[str]:
    """Errors by source, then by group."""
    yield f"{'source':50}{'rows':>5}{'median':>8}{'p90':>8}{'bias':>8}"
    by_source = defaultdict(list)
    for result in _timed(results):
        by_source[result.source].append(result)
    for source, each in sorted(by_source.items(), key=lambda item: -len(item[1])):
        errors = [error(result) for result in each]
        bias = statistics.median((result.tokens or 0) / (result.measured or 1) for result in each) - 1
        yield f"{source:50}{len(each):5}{percentile(errors, 0.5):8.1%}{percentile(errors, 0.9):8.1%}{bias:+8.1%}"
    grouped = groups(results)
    if grouped:
        yield ""
        yield f"{'group':50}{'rows':>5}{'median':>8}{'p90':>8}{'rank':>8}{'regret':>8}"
    for name, group in grouped.items():
        errors = [error(result) for result in group]
        rank = spearman([each.tokens or 0 for each in group], [each.measured or 0 for each in group])
        label = " ".join(part for part in name[:4] if part)
        yield (
            f"{label[:50]:50}{len(group):5}{percentile(errors, 0.5):8.1%}{percentile(errors, 0.9):8.1%}"
            f"{rank:8.2f}{regret(group):8.1%}"
        )


def load(path: Path) -> list[Row]:
    """Rows of a file.

    Raises:
        UserError: it is not a table of runs.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            names, rows = reader.fieldnames or [], list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise UserError(f"cannot be read: {problem}", where=str(path), rule="a CSV file of runs") from None
    required = _MEMORY_REQUIRED if "suite" in names else _REQUIRED
    missing = [name for name in required if name not in names]
    if missing:
        raise UserError(
            f"no column {', '.join(missing)}", where=str(path), rule=f"a row needs {', '.join(required)}",
            fix="the columns of benchmarks/data/planner/published_runs.csv",
        )  # fmt: skip
    return [{name: value or "" for name, value in row.items() if name} for row in rows]


def main() -> int:
    """Replay a file; 2 where it cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write predictions and figures")
    options = parser.parse_args()
    try:
        results = replay(load(options.rows))
    except UserError as problem:
        print(problem, file=sys.stderr)
        return 2
    figures = summary(results)
    print("\n".join(table(results)))
    print()
    for name, value in figures.items():
        print(f"{name:30}{value:10.4g}" if isinstance(value, float) else f"{name:30}{value!s:>10}")
    if options.json:
        rows = [
            {
                "index": result.index,
                "tokens_per_s_per_gpu": result.tokens,
                "memory_gb": result.bytes / 1e9 if result.bytes else None,
                "fits": result.fits,
                "refused": result.refused,
                "assumed": result.assumed,
            }
            for result in results
        ]
        text = json.dumps({"rows": rows, "summary": figures}, indent=1, allow_nan=False) + "\n"
        try:
            options.json.write_text(text, encoding="utf-8")
        except OSError as problem:
            print(f"--json: cannot write {options.json}: {problem.strerror}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
