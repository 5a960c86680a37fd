"""A line on a terminal where importing the large libraries takes long, so that no command seems to hang."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

LARGE = frozenset({"torch", "megatron", "transformers", "datasets", "mlflow", "optuna", "vllm", "onnx"})
SECONDS = 3.0
"""Of imports without a line."""
_BETWEEN = 0.2


class _Watch(MetaPathFinder):
    """Finds nothing itself: it sees the first import of a large library."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name in LARGE and self in sys.meta_path:
            sys.meta_path.remove(self)
            threading.Thread(target=self._say, name="loading", daemon=True).start()

    def _say(self) -> None:
        time.sleep(self._seconds)
        before = len(sys.modules)
        time.sleep(_BETWEEN)
        if len(sys.modules) > before or any(_is_loading(name) for name in LARGE):
            print("loading libraries ...", file=sys.stderr, flush=True)


def _is_loading(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def announce_loading(seconds: float = SECONDS) -> None:
    """From now on, say once on a terminal that large libraries are loaded, if that takes longer than this."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.meta_path.insert(0, _Watch(seconds))
