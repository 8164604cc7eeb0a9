"""Where each released package runs: an environment of its own under the cache, made on demand with pinned versions.

A package is installed without its dependencies plus the few that its training step really imports, so that nothing for
GPUs comes along; torch is the same for all. Standard library only: the orchestrator loads no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Peer:
    """A released package."""

    name: str
    package: str  # pinned
    transformers: str  # the newest that the package admits
    needed: tuple[str, ...] = ()  # with their dependencies
    bare: tuple[str, ...] = ()  # without

    @property
    def script(self) -> Path:
        return Path(__file__).with_name(f"{self.name}_step.py")

    @property
    def recipe(self) -> str:
        """What is installed; an environment with another recipe is made anew."""
        return "\n".join((TORCH, self.transformers, *self.needed, *self.bare, self.package))


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "speculators",
            "speculators==0.9.0",
            "transformers==5.19.0",
            ("openai", "loguru", "pydantic-settings", "psutil", "datasets<=5.1.0"),
            ("hs-connectors==0.9.0",),
        ),
        Peer("specforge", "specforge==0.2.0", "transformers==5.8.1"),
        Peer("automodel", "nemo-automodel==0.7.0", "transformers==5.18.0", ("datasets", "torchdata", "pillow")),
    )
}


def cache() -> Path:
    """$SPECGRAFT_CACHE, else $XDG_CACHE_HOME/specgraft, else ~/.cache/specgraft, as in `targets.embedded`."""
    if root := os.environ.get("SPECGRAFT_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specgraft"


def interpreter(peer: Peer) -> Path:
    """The peer's Python; makes its environment where there is none. Raises RuntimeError with pip's last words."""
    folder = cache() / "peers" / peer.name
    python, marker = folder / "bin" / "python", folder / "recipe.txt"
    if marker.is_file() and marker.read_text() == peer.recipe:
        return python
    print(f"making {folder} (a few minutes, once)", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, TORCH, peer.transformers, *peer.needed])
    _run([*pip, "--no-deps", *peer.bare, peer.package])
    marker.write_text(peer.recipe)
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise RuntimeError(f"{' '.join(command[1:5])} ..: {said[-1] if said else 'failed'}")
