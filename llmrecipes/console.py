"""The one place where logging and the terminal are set up."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

from llmrecipes.redact import redact

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

QUIET = ("megatron.core.distributed.distributed_data_parallel", "megatron.core.models.hybrid.hybrid_model")
"""Modules of megatron-core 0.19 that warn of nothing that users can change: of deprecated arguments, and that muP with
`HybridModel` is not validated, which our tests do."""

WIDTH_OF_FILES = 240


class _Redacting(logging.Formatter):
    """Redacts messages and their tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _ToStderr(logging.StreamHandler[TextIO]):
    """To what standard error is at the time: notebooks and tests replace it, and close the one before."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def setup_logging(level: int = logging.INFO, rank: int = 0) -> None:
    """Log to stderr, with the rank if it is not 0; libraries log at WARNING and above."""
    who = f"[rank {rank}] " if rank else ""
    handler = _ToStderr()
    handler.setFormatter(_Redacting(f"%(asctime)s %(levelname)s {who}%(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("llmrecipes").setLevel(level)
    ignore_library_warnings()
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler, and would print everything twice


def ignore_library_warnings() -> None:
    """Hide what libraries warn of at every start: deprecations and missing accelerators, nothing a user can act on."""
    warnings.filterwarnings("ignore", module=r"(torch|megatron|transformers|datasets|mlflow)(\.|$)")
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_not_about_a_missing_gpu)


def _is_not_about_a_missing_gpu(record: logging.LogRecord) -> bool:
    """Whether torch says more than that a machine with nvcc, such as a login node, has no GPU."""
    return not str(record.msg).startswith("No CUDA runtime is found")


@cache
def console() -> Console:
    """The rich console on stdout; imported on demand to keep `llmrecipes list` fast."""
    from rich.console import Console

    class Redacting(Console):
        """Redacts before rich wraps a line or adds colours, which would cut a secret into pieces."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(redact(text), **options)

    # A file or a pipe has no width that tables could be wrapped at.
    wide = None if sys.stdout.isatty() else WIDTH_OF_FILES
    return Redacting(highlight=False, soft_wrap=wide is not None, width=wide)


def number(value: float) -> str:
    """A count in short: 124,439,808 is `124.4M`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:g}"


def duration(seconds: float) -> str:
    """Seconds in readable form: `4.2s`, `42s`, `3m12s`, `5h07m`, `2d03h`; `?` if not finite."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
