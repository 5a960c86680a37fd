"""One rank of a run, from joining the others to the last checkpoint."""

from __future__ import annotations

import gc
import logging
import os
import socket
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module

from llmrecipes.engine.backends import backend
from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.builds import import_megatron
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.plan.run_plan import RunPlan, derive_run
from llmrecipes.train.rank import failure_reported, nodes, rank_main
from llmrecipes.train.spec import RunSpec

logger = logging.getLogger(__name__)


IMPORTED_LATER = ("fabric_check", "observing", "stage")
"""Modules of this package that a rank imports after its spec was read; with them come all others."""


def import_all(spec: RunSpec) -> None:
    """Import what a rank of a run needs, so that a spare has it before it is the rank; no device is used."""
    require_packages(spec.recipe)
    backend(spec.recipe)
    for name in IMPORTED_LATER:
        import_module(f"llmrecipes.train.{name}")


def run(spec: RunSpec) -> ExitCode:
    """Train, and return the exit code.

    Raises:
        UserError: a problem the user can fix.
    """
    require_packages(spec.recipe)
    import_megatron()
    gc.freeze()  # modules live to the end, and the first collection would take a tenth of the start to look at them
    # Imported here so that a rank with an invalid spec fails before torch is loaded.
    from llmrecipes.checkpoint.saver import claim, saver_group
    from llmrecipes.data.folder.prepared import open_prepared
    from llmrecipes.faults.collectives import record_collectives
    from llmrecipes.faults.signals import catch_signals
    from llmrecipes.hardware.nics import ports
    from llmrecipes.train.fabric_check import leave_out_other_adapters, nccl_output, report_on_error, require_fabric
    from llmrecipes.train.joined import Joined
    from llmrecipes.train.observing import observers
    from llmrecipes.train.remote_copies import bring
    from llmrecipes.train.stage import layouts, train_stages

    recipe = spec.recipe
    watching = observers(spec)
    engines = backend(recipe)
    platform = engines.platform(int(os.environ.get("LOCAL_RANK", "0")))
    if spec.on_gpus:
        _require_gpu(platform.name)
    cluster = detect().times(nodes())
    plan = _as_planned(spec, cluster)  # before the ranks wait for each other
    for stage in plan.stages if recipe.stages else ():  # the later ones are refused before step 1 too
        engines.require(stage, platform)
    leave_out_other_adapters(ports())
    record_collectives()
    # Errors are reported before anything is closed; the process group is left last.
    with (
        nccl_output() as output,
        engines.connect(platform) as rank,
        layouts(engines) as lay_out,
        ExitStack() as stack,
        failure_reported(recipe),
        report_on_error(output),
    ):
        network = require_fabric(platform, output, allow_socket=spec.allow_socket)
        prepared = open_prepared(recipe, spec.data_dir)
        store = spec.run.store()
        stop = stack.enter_context(catch_signals(lambda: _newest(store)))
        # A run that still writes here is refused before its checkpoints are judged.
        group = saver_group()
        stack.callback(store.release)
        claim(store, group)
        bring(spec, store, group)
        joined = Joined(spec, plan, cluster, platform, rank, lay_out, prepared, store, stop, group, network, watching)
        return train_stages(joined)


def _require_gpu(device: str) -> None:
    if device != "cuda":
        raise UserError(
            f"the run is planned for GPUs, but torch sees none on {socket.gethostname()}",
            where="torch.cuda",
            rule="a run planned for GPUs must not train on CPUs",
            fix="run llmrecipes doctor on that node; a container needs docker run --gpus all, or apptainer exec --nv",
        )


def _as_planned(spec: RunSpec, cluster: Cluster) -> RunPlan:
    """The plan as this rank derives it.

    Raises:
        UserError: it is not the one that was checked before the start.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    planned = spec.planned or {}
    cluster = replace(cluster, nvlink_domain=spec.nvlink_domain)
    here = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"
    # A different number of ranks may not have a plan at all.
    if (world_size := planned.get("world_size", ranks)) != ranks:
        raise UserError(
            f"WORLD_SIZE is {ranks}, and the run was planned for {world_size}",
            where=here,
            rule="llmrecipes train starts all ranks itself, and sets RANK and WORLD_SIZE for them",
            fix="unset RANK WORLD_SIZE; do not start it with torchrun or mpirun",
        )
    plan = derive_run(spec.recipe, ranks, cluster)
    facts = plan.facts()
    differing = [f"{name} {facts[name]}, not {then}" for name, then in planned.items() if facts.get(name, then) != then]
    if differing:
        raise UserError(
            f"this rank derives a different plan: {'; '.join(differing)}",
            where=here,
            rule="all ranks must train according to the plan that was checked before the start",
            fix="use identical nodes, and the same version of llmrecipes on all of them",
        )
    return plan


def _newest(store: object) -> str:
    entries = store.entries()  # type: ignore[attr-defined]
    return str(entries[-1].path) if entries else "none"


if __name__ == "__main__":
    rank_main(RunSpec, run, import_all)
