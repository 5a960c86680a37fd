"""Import what a run imports, and print the versions; run during an image build, so that a broken image fails it."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import sys

MODULES = (
    "torch",
    "megatron.core",
    "megatron.core.models.gpt",
    "datasets",
    "tokenizers",
    "transformers",
    "mlflow",
    "llmrecipes.train.worker",
)
EXTRAS = {
    "corpora": ("fasttext", "ftfy", "gigatoken", "py3langid", "rensa", "resiliparse.extract.html2text", "s3fs"),
    "energy": ("codecarbon",),
    "eval": ("lm_eval",),
    "gpu": ("pynvml",),
    "prometheus": ("prometheus_client",),
    "quantize": ("compressed_tensors",),
    "ray": ("ray",),
    "runtimes": ("gguf", "onnx", "onnxruntime", "onnxscript"),
    "search": ("cmaes", "llmrecipes.search.worker"),
    "serve": ("openai", "uvicorn"),
    "server": ("boto3", "psycopg2"),
    "wandb": ("wandb",),
    "zero": ("deepspeed",),
}
"""What an image with an extra of pyproject.toml has besides."""


CUDA_MODULES = ("transformer_engine", "transformer_engine.pytorch", "flash_attn", "deepspeed.accelerator")
"""What the CUDA image has besides; these open libraries of CUDA, whose driver a machine without a GPU lacks."""
CUDA_PROGRAMS = ("ib_write_bw", "ib_send_lat", "ibstat", "perfquery", "ibv_devinfo")
"""To look for a fault of a link from inside a pod."""
DRIVER = re.compile(r"libcuda\.so|libnvidia-ml\.so|no NVIDIA driver|CUDA driver", re.IGNORECASE)


def import_cuda() -> None:
    """Import the CUDA packages; only a missing driver, which a build machine may lack, is no error."""
    for name in CUDA_MODULES:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            if not DRIVER.search(str(error)):
                raise
            print(f"{name} not checked, this machine has no driver: {error}")
        else:
            print(f"{name} {getattr(module, '__version__', '')}".rstrip())
    if missing := [name for name in CUDA_PROGRAMS if shutil.which(name) is None]:
        sys.exit(f"not in the image: {', '.join(missing)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Import what a run imports.")
    parser.add_argument("--cuda", action="store_true", help="also what the CUDA image has besides")
    parser.add_argument("--extras", default="", help="also what these extras have, by spaces")
    parser.add_argument("--torch", help="file and version that torch must have, as one string")
    parser.add_argument("--user", action="store_true", help="fail as root")
    options = parser.parse_args()
    if options.user and os.getuid() == 0:
        sys.exit("the image would run as root")
    for name in (*MODULES, *(name for extra in options.extras.split() for name in EXTRAS[extra])):
        module = importlib.import_module(name)
        print(f"{name} {getattr(module, '__version__', '')}".rstrip())
    if options.cuda:
        import_cuda()
    import torch

    found = f"{torch.__file__} {torch.__version__}"
    if options.torch and found != options.torch:
        sys.exit(f"torch was replaced: {found} instead of {options.torch}")


if __name__ == "__main__":
    main()
