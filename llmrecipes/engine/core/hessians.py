"""What text says about the columns of a matrix, layer by layer: shared by GPTQ and SparseGPT, of any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

DAMP = 0.01
"""Share of the mean of a Hessian's diagonal that is added to it (arXiv 2210.17323, section 3)."""
BLOCK = 128
"""Columns that are updated before those behind them."""


def add_inputs(hessians: dict[str, torch.Tensor], name: str, given: torch.Tensor) -> None:
    """Add the outer products of a matrix's inputs to its Hessian [in, in], in fp32.

    Args:
        hessians: by name; a new one starts with zeros.
        name: of the matrix.
        given: [tokens, in].
    """
    rows = given.float()
    if name not in hessians:
        hessians[name] = rows.new_zeros(rows.size(-1), rows.size(-1))
    hessians[name].addmm_(rows.t(), rows)


def inverse_factor(hessian: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of a Hessian, whose rows say how the columns behind one make up for a
    change of it (arXiv 2210.17323, section 3, step 3).

    Args:
        hessian: [in, in]; it is overwritten.
        weight: [out, in]; columns without an input become zero.
    """
    diagonal = torch.arange(hessian.size(0), device=hessian.device)
    dead = hessian[diagonal, diagonal] == 0
    hessian[diagonal[dead], diagonal[dead]] = 1
    weight[:, dead] = 0
    hessian[diagonal, diagonal] += DAMP * hessian.diagonal().mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


class _Stop(Exception):
    """The first layer has its input."""


def first_states(
    run: Callable[[torch.Tensor], object], layers: Sequence[nn.Module], batches: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Hidden states of each batch before the first layer, and what each layer gets besides.

    Args:
        run: passes a batch through the model.
        layers: of the model, in order.
        batches: token ids, of one length.
    """
    arguments: list[dict[str, Any]] = []
    states: list[torch.Tensor] = []

    def see(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not arguments:
            states.append(_state(given, named))
        arguments.append(
            {key: value for key, value in named.items() if key not in ("past_key_values", "hidden_states")}
        )

    hooks = [layer.register_forward_pre_hook(see, with_kwargs=True) for layer in layers]
    run(batches[0])
    for hook in hooks:
        hook.remove()

    def stop(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        states.append(_state(given, named))
        raise _Stop

    hook = layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    for batch in batches[1:]:
        try:
            run(batch)
        except _Stop:
            continue
    hook.remove()
    return states, arguments


def _state(given: tuple[Any, ...], named: Mapping[str, Any]) -> torch.Tensor:
    state: torch.Tensor = given[0] if given else named["hidden_states"]
    return state
