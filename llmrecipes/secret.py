"""Detects names of secrets."""

from __future__ import annotations

import re

# A partition key (NCCL_IB_PKEY, UCX_IB_PKEY) is not a secret but a number of the fabric.
_NAME = re.compile(r"TOKEN|(?<!_P)KEY|SECRET|PASSW|CREDENTIAL|AUTH|JWT", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether the name of a variable or option suggests that its value must not be shown or shared."""
    return _NAME.search(name) is not None
