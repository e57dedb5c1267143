"""What is installed and what can run here, in words. Needs torch alone."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

import torch

_PACKAGES = (
    ("numpy", "torch"),
    ("triton", "GPU kernels"),
    ("transformers", "train"),
    ("safetensors", "train"),
    ("pydantic", "train"),
    ("tensorboard", "train"),
    ("matplotlib", "plot"),
    ("gguf", "gguf"),
    ("wandb", "log.wandb=true"),
)


def version() -> str:
    """Of the installed sapo_fast."""
    try:
        return importlib.metadata.version("sapo_fast")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: imported from a folder)"


def describe() -> str:
    """Versions, devices and every backend with its reason: what to put into a bug report."""
    from sapo_fast import backends

    lines = [
        f"sapo_fast {version()}",
        f"python    {platform.python_version()} ({sys.platform}, {platform.machine()})",
        f"torch     {torch.__version__}, {torch.get_num_threads()} threads, CPU capability {torch.backends.cpu.get_cpu_capability()}",
        f"cpu       {_cpu_name()}, {os.cpu_count()} cores",
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            lines.append(
                f"cuda:{index}    {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}, CUDA {torch.version.cuda}"
            )
    else:
        built = f"torch is built for CUDA {torch.version.cuda}, but sees no device" if torch.version.cuda else "torch is built without CUDA"
        lines.append(f"cuda      none ({built})")
    lines += ["", "packages"]
    for name, use in _PACKAGES:
        try:
            lines.append(f"  {name:<14}{importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"  {name:<14}not installed (for: {use})")
    rows = backends.explain()
    lines += ["", "backends"]
    width = max(len(row.operation) for row in rows)
    for row in rows:
        lines.append(f"  {row.operation:<{width}}  {row.backend:<7} {'yes' if row.available else 'no ':<4} {row.reason}")
    return "\n".join(lines)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            return next(line.split(":", 1)[1].strip() for line in stream if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
