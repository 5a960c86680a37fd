"""A checkpoint that an earlier version wrote, and what its run came to without an interruption.

tests/golden/checkpoint-with-json-index.tar.xz is of two data-parallel ranks with the distributed optimizer; the first
one gathered its state and wrote it. It has `index.json` and torch's `.metadata`. Without the former, and with an
unprotected manifest, it is what the oldest version wrote.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from llmrecipes.checkpoint.manifest import MANIFEST_NAME, read_manifest
from llmrecipes.engine.core.checkpoint.index import JSON_NAME
from tests.dist.table import BF16_BOUND, Row, Sections
from tests.dist.training import Outcome, go_on
from tests.dist.worlds import GlooWorld

pytestmark = pytest.mark.dist

SAVED_AT = 2
ARCHIVE = Path(__file__).parents[1] / "golden" / "checkpoint-with-json-index.tar.xz"
SMALL: Sections = {
    "train": {"train_iters": 4, "global_batch_size": 8},
    "model": {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 1, "ffn_hidden_size": 24,
        "vocab_size": 64, "seq_length": 16,
    },
}  # fmt: skip
WHOLE: Sections = {**SMALL, "layout": {"use_distributed_optimizer": False}}


@pytest.mark.parametrize(
    ("layout", "changes", "oldest"),
    [("dp2", SMALL, False), ("pp2", SMALL, False), ("dp2", WHOLE, True)],
    ids=["same layout", "another layout", "pickled index, another optimizer"],
)
def test_a_run_of_an_earlier_version_is_resumed(
    worlds: dict[int, GlooWorld], tmp_path: Path, layout: str, changes: Sections, oldest: bool
) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    (checkpoint,) = (tmp_path / "checkpoint").glob("step-*")
    if oldest:
        make_oldest(checkpoint)
    outcome: Outcome = worlds[2].run(go_on, Row("llama in bf16", layout, changes).recipe, tmp_path / "checkpoint")
    assert outcome.lost == [], "weights, master weights and moments, bit for bit"
    whole = json.loads((tmp_path / "uninterrupted.json").read_text("utf-8"))
    bound = 1e-3 if layout == "dp2" else BF16_BOUND
    assert outcome.losses == pytest.approx(whole["losses"][SAVED_AT:], rel=bound)
    assert outcome.norms == pytest.approx(whole["norms"][SAVED_AT:], rel=bound)
    assert outcome.valid == pytest.approx(whole["valid"], rel=bound)


def make_oldest(checkpoint: Path) -> None:
    """Leave what the oldest version wrote."""
    (checkpoint / JSON_NAME).unlink()
    manifest = read_manifest(checkpoint)
    files = {name: record for name, record in manifest.files.items() if name != JSON_NAME}
    old = manifest.model_copy(update={"format": 1, "files": files})
    (checkpoint / MANIFEST_NAME).write_text(old.model_dump_json(indent=1, exclude={"recipe"}), "utf-8")
