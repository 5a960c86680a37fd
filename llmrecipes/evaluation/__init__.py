"""Evaluation of a model: perplexity, lm-evaluation-harness tasks, and checks of the text that it writes."""

from __future__ import annotations

from typing import Literal

Check = Literal["repetition", "memorisation", "bias"]
CHECKS: tuple[Check, ...] = ("repetition", "memorisation", "bias")
