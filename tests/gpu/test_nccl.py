"""What only several GPUs show: the parity table over NCCL, and experts that tensor-parallel ranks share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from llmrecipes.hardware.builds import cuda_version
from llmrecipes.hardware.cluster import visible_gpus
from llmrecipes.launch.local import run_ranks
from tests.dist.worlds import ROOT

pytestmark = [pytest.mark.gpu8, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what one GPU computes of every row."""
    if cuda_version() is None:
        pytest.skip(f"needs torch with CUDA; {'torch is a CPU build' if find_spec('torch') else 'no torch'}")
    if not visible_gpus():
        pytest.skip("needs GPUs; nvidia-smi lists none")
    folder = tmp_path_factory.mktemp("parity")
    assert _run(folder, 1) == 0
    return folder


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_table_over_nccl(ranks: int, references: Path) -> None:
    """Rows of this number of ranks, with the uneven tokens for shared experts that gloo cannot gather."""
    if len(visible_gpus()) < ranks:
        pytest.skip(f"needs {ranks} GPUs; {len(visible_gpus())} are here")
    assert _run(references, ranks) == 0, (references / f"ranks-{ranks}.json").read_text("utf-8")


def _run(folder: Path, ranks: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        return run_ranks("tests.dist.under_torchrun", ["--out", str(folder)], world_size=ranks, threads=1, logs=folder)
