"""Import what a run imports, and print the versions; run during an image build, so that a broken image fails it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

MODULES = (
    "torch",
    "megatron.core",
    "megatron.core.models.gpt",
    "deepspeed",
    "datasets",
    "tokenizers",
    "transformers",
    "mlflow",
    "psycopg2",
    "llmrecipes.train.worker",
    "llmrecipes.search.worker",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Import what a run imports.")
    parser.add_argument("--torch", help="file and version that torch must have, as one string")
    parser.add_argument("--user", action="store_true", help="fail as root")
    options = parser.parse_args()
    if options.user and os.getuid() == 0:
        sys.exit("the image would run as root")
    for name in MODULES:
        module = importlib.import_module(name)
        print(f"{name} {getattr(module, '__version__', '')}".rstrip())
    import torch

    found = f"{torch.__file__} {torch.__version__}"
    if options.torch and found != options.torch:
        sys.exit(f"torch was replaced: {found} instead of {options.torch}")


if __name__ == "__main__":
    main()
