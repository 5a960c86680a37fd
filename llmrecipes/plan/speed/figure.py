"""Picture of a prediction: memory of the stages, passes of the pipeline, and what a step consists of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmrecipes.plan.speed.schedule import run
from llmrecipes.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from llmrecipes.plan.speed.curve import CurvePoint
    from llmrecipes.plan.speed.forecast import Forecast

_MEMORY = {"weights": "#4477aa", "gradients": "#66ccee", "optimizer": "#228833", "activations": "#ccbb44",
           "other": "#bbbbbb"}  # fmt: skip
_STEP = {"compute": "#4477aa", "tensor": "#ee6677", "expert": "#aa3377", "context": "#ccbb44", "bubble": "#dddddd",
         "gradients": "#66ccee", "optimizer": "#228833", "teacher": "#999933", "attack": "#882255",
         "rounding": "#bbbbbb"}  # fmt: skip
_FORWARD, _BACKWARD = ("#4477aa", "#88aacc"), ("#228833", "#77bb88")
"""Of even and of odd chunks."""
_MOST_PASSES = 6000
"""A picture with more is slow to open, and its passes are narrower than a pixel."""


def draw(forecast: Forecast) -> Figure:
    """The figure."""
    from matplotlib.figure import Figure

    stages = len(forecast.memory)
    figure = Figure(figsize=(10, 6.5 + 0.12 * min(stages, 32)), layout="constrained")
    memory, passes, parts = figure.subplots(3, 1, height_ratios=(3, 2 + 0.12 * min(stages, 32), 1))
    figure.suptitle(
        f"{forecast.plan.recipe.name} on {forecast.plan.layout.world_size:,} × {forecast.device.name}: "
        f"{forecast.tokens_per_second_per_gpu:,.0f} tokens/s a GPU, predicted"
    )
    _memory(memory, forecast)
    _passes(passes, forecast)
    _parts(parts, forecast)
    return figure


def draw_curve(name: str, device: str, points: Sequence[CurvePoint]) -> Figure:
    """Utilisation and speed over numbers of GPUs, strong and weak."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    share, speed = figure.subplots(2, 1, sharex=True)
    figure.suptitle(f"{name} on {device}, the fastest layout at each number of GPUs, predicted")
    for kind, color, marker in (("strong", "#4477aa", "o"), ("weak", "#228833", "s")):
        rows = [point.as_dict() for point in points if point.kind == kind and point.candidate is not None]
        gpus = [point["gpus"] for point in rows]
        share.plot(
            gpus, [100 * point["mfu_full"] for point in rows], color=color, marker=marker, label=f"{kind} scaling"
        )
        rates = [point["tokens_per_second_per_gpu"] * point["gpus"] for point in rows]
        speed.plot(gpus, rates, color=color, marker=marker, label=f"{kind} scaling")
    share.set(ylabel="MFU, %", ylim=(0, None))
    speed.set(ylabel="tokens/s, all GPUs", xlabel="GPUs", xscale="log", yscale="log")
    ticks = sorted({point.gpus for point in points})
    speed.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
    speed.minorticks_off()
    share.legend(frameon=False)
    return figure


def _memory(axes: Axes, forecast: Forecast) -> None:
    from matplotlib.ticker import MaxNLocator

    stages = forecast.as_dict()["memory_gib"]["stages"]
    bottom = [0.0] * len(stages)
    for name, color in _MEMORY.items():
        sizes = [stage[name] for stage in stages]
        axes.bar(range(len(stages)), sizes, bottom=bottom, color=color, label=name)
        bottom = [below + size for below, size in zip(bottom, sizes, strict=True)]
    axes.axhline(forecast.plan.memory_capacity_bytes / GIB, color="#cc3311", linestyle="--", label="available")
    axes.set(ylabel="GiB of a rank", xlabel="pipeline stage")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _passes(axes: Axes, forecast: Forecast) -> None:
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    step = forecast.step
    chunks = forecast.plan.layout.virtual_pipeline_model_parallel_size
    stages = len(step.passes)
    microbatches = forecast.plan.num_microbatches
    number = min(microbatches, 2 * stages)
    if 4 * stages * stages * chunks > _MOST_PASSES or (chunks > 1 and number % stages):
        number = min(microbatches, stages)
    ahead, back = zip(*step.passes, strict=True)
    ends = run(ahead, back, number, step.hop, blocking=chunks == 1)
    for stage in range(stages):
        for forward, colors, of_stage in ((True, _FORWARD, ahead), (False, _BACKWARD, back)):
            for odd in (0, 1):
                seconds = of_stage[stage]
                bars = [
                    (end - seconds[chunk], seconds[chunk])
                    for (kind, place, chunk, _), end in ends.items()
                    if (kind, place, chunk % 2) == (forward, stage, odd)
                ]
                axes.broken_barh(bars, (stage - 0.4, 0.8), facecolors=colors[odd], edgecolor="white", linewidth=0.3)
    axes.set(ylabel="pipeline stage", xlabel=f"seconds, with {number} of {microbatches:,} micro-batches a step")
    axes.invert_yaxis()
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    names = {"forward": _FORWARD[0], "backward": _BACKWARD[0]}
    if chunks > 1:
        names |= {"forward, odd chunks": _FORWARD[1], "backward, odd chunks": _BACKWARD[1]}
    handles = [Patch(color=color, label=name) for name, color in names.items()]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _parts(axes: Axes, forecast: Forecast) -> None:
    left = 0.0
    for name, seconds in forecast.step.parts().items():
        if seconds > 0:
            axes.barh(
                [0], [seconds], left=[left], color=_STEP[name], label=f"{name} {seconds / forecast.step.seconds:.1%}"
            )
            left += seconds
    axes.set(yticks=[], xlabel="seconds of a step")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
