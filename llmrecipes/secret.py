"""Which names are those of secrets."""

from __future__ import annotations

import re

# A partition key (NCCL_IB_PKEY, UCX_IB_PKEY) is a number of the fabric.
_NAME = re.compile(r"TOKEN|(?<!_P)KEY|SECRET|PASSW|CREDENTIAL|AUTH|JWT", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a variable or option is named like something whose value must not be shown or shared."""
    return _NAME.search(name) is not None
