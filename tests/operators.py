"""Compiles DeepSpeed's operators before the tests that use them: `python -m tests.operators`.

The compiler takes both cores for minutes; beside other tests it would make them exceed their limits.
"""

from __future__ import annotations

import os

from llmrecipes.engine.deepspeed.build import load_operators
from llmrecipes.hardware.builds import ASYNC_IO, CPU_ADAM, operator_obstacle, search_path
from llmrecipes.recipe.sections.zero import Zero
from tests.selection import NVME, has_turn


def main() -> None:
    """Compile what can be compiled here; the tests say what is missing for the others."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = search_path()
    if operator_obstacle(CPU_ADAM) is None:
        devices = {"offload_optimizer": "cpu"}
        commit = os.environ.get("TESTS_COMMIT")
        if operator_obstacle(ASYNC_IO) is None and (not commit or has_turn(NVME, commit)):
            devices = {"offload_optimizer": "nvme", "nvme_path": "/"}
        load_operators(Zero.model_validate({"stage": 3, **devices}))


if __name__ == "__main__":
    main()
