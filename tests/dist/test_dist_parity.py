"""The same training on one, two and four ranks, and checkpoints that go from one number of ranks to another."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmrecipes.launch.local import run_ranks
from tests.dist.world_program import PARITY, POISONED, RESUMED
from tests.helpers import ROOT, largest_difference

pytestmark = pytest.mark.dist

Found = dict[int, dict[str, Any]]

# bf16 rounds each rank's weights and activations alike, but the sums of gradients in another order.
PARITY_BOUND = {"bf16": 5e-3}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What came out, by the number of ranks; the world of two saves what the others resume."""
    folder = tmp_path_factory.mktemp("worlds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        for size in (2, 1, 4):
            code = run_ranks("tests.dist.world_program", [str(folder)], world_size=size, threads=1, logs=folder)
            logs = "\n".join(path.read_text()[-3000:] for path in folder.glob("rank-*.log"))
            assert code == 0, f"world of {size}: {logs}"
    return {size: json.loads((folder / f"world-{size}.json").read_text()) for size in (1, 2, 4)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", PARITY)
def test_the_number_of_ranks_changes_no_number(worlds: Found, name: str, size: int) -> None:
    one, other = worlds[1]["parity"][name], worlds[size]["parity"][name]
    bound = PARITY_BOUND.get(name, 1e-6)
    assert largest_difference(one["losses"], other["losses"]) < bound
    assert largest_difference(one["norms"], other["norms"]) < bound
    assert largest_difference([one["valid"]], [other["valid"]]) < bound
    assert other["same_weights"]
    assert one["losses"][0] - one["losses"][-1] > 0.01


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in PARITY if name not in ("distributed optimizer", "llama", "bf16")])
def test_how_the_work_is_spread_changes_no_number(worlds: Found, name: str, size: int) -> None:
    plain, other = worlds[size]["parity"]["distributed optimizer"], worlds[size]["parity"][name]
    assert largest_difference(plain["losses"], other["losses"]) < 1e-6
    assert largest_difference(plain["norms"], other["norms"]) < 1e-6


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_of_two_ranks_goes_on_on_any_number(worlds: Found, name: str, size: int) -> None:
    saved, resumed = worlds[2]["resumed"][name], worlds[size]["resumed"][name]
    bound = 5e-3 if name == "bf16" else 1e-5
    assert largest_difference(saved["losses"], resumed["losses"]) < bound
    assert largest_difference(saved["norms"], resumed["norms"]) < bound


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_stop_at_a_nan_and_name_where_it_began(worlds: Found, size: int) -> None:
    said = worlds[size]["poisoned"]
    assert len(said) == size
    assert len(set(said)) == 1
    for part in ("93 ", "loss is nan", "step 7", f"rank {size - 1};", f"{POISONED} (nan among 1 of"):
        assert part in said[0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_hear_of_a_stop_that_one_was_asked_for(worlds: Found, size: int) -> None:
    assert worlds[size]["stopping"] == [False, True] * size
