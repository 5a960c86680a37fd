"""Whether TransformerEngine can be imported here."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec

PACKAGE = "transformer_engine"


@cache
def obstacle() -> str | None:
    """Why TransformerEngine cannot be imported; None if it can. To be called before megatron-core is imported.

    One that was built for another torch or CUDA raises anything: OSError, RuntimeError, AssertionError. megatron-core
    imports it in many modules and handles ImportError alone; so after any error, later imports of it raise that.
    """
    if find_spec(PACKAGE) is None:
        return "TransformerEngine is not installed"
    try:
        import_module(f"{PACKAGE}.pytorch")
    except Exception as error:
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.modules[PACKAGE] = None  # type: ignore[assignment]  # what the import system raises ImportError for
        reason = " ".join(str(error).split("\n")[0].split())
        return f"TransformerEngine cannot be imported: {type(error).__name__}: {reason}"
    return None
