"""Command lines of the engines, and the target as GGUF."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from specgraft.cli import main
from specgraft.engines import install
from specgraft.engines.gguf import gguf_path, to_gguf
from specgraft.engines.serve import Serving


@pytest.fixture
def engines(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECGRAFT_ENGINES", str(tmp_path / "engines"))
    return tmp_path / "engines"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def follows(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


@pytest.mark.parametrize("engine", ["llamacpp", "vllm", "sglang"])
def test_servers_listen_on_this_machine_only_and_share_no_prefix(engine, engines, model):
    command = Serving(engine, model, 8123, context=500, parallel=3).command(dry=True)
    assert follows(command, "--host") == "127.0.0.1" and follows(command, "--port") == "8123"
    assert command[0].startswith(str(engines))
    prefix = {"llamacpp": "--no-context-shift", "vllm": "--no-enable-prefix-caching", "sglang": "--disable-radix-cache"}
    assert prefix[engine] in command


def test_the_context_is_for_each_request(engines, model):
    assert follows(Serving("llamacpp", model, 1, context=500, parallel=3).command(dry=True), "-c") == "1500"
    assert follows(Serving("vllm", model, 1, context=500, parallel=3).command(dry=True), "--max-model-len") == "500"


def test_keys_and_values_are_as_exact_as_the_weights(engines, model):
    command = Serving("llamacpp", model, 1, dtype="float32").command(dry=True)
    assert follows(command, "-ctk") == follows(command, "-ctv") == "f32" and follows(command, "-m").endswith("-f32.gguf")
    assert follows(command, "-fa") == "off" and "-fa" not in Serving("llamacpp", model, 1).command(dry=True)
    assert follows(Serving("vllm", model, 1, dtype="float32").command(dry=True), "--dtype") == "float32"


def test_no_hub_and_no_reports(engines, model):
    assert Serving("vllm", model, 1).environment()["HF_HUB_OFFLINE"] == "1"
    assert Serving("vllm", model, 1).environment()["VLLM_NO_USAGE_STATS"] == "1"
    assert Serving("vllm", model, 1, threads=2).environment()["OMP_NUM_THREADS"] == "2"


def test_what_cannot_be_served(engines, model, tmp_path):
    with pytest.raises(ValueError, match="engine 'tgi' is unknown: use llamacpp, vllm, sglang"):
        Serving("tgi", model, 1)
    with pytest.raises(ValueError, match="dtype 'fp4' is unknown"):
        Serving("vllm", model, 1, dtype="fp4")
    with pytest.raises(ValueError, match=r"vllm 0\.32\.0 is not installed .* run `make engines ENGINES=vllm`"):
        Serving("vllm", model, 1).command()
    with pytest.raises(ValueError, match=r"no config\.json there"):
        Serving("llamacpp", tmp_path, 1).command(dry=True)


def test_serve_prints_the_command(engines, model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["specgraft", "serve", "llamacpp", "x.gguf", "--port", "9001", "--threads", "2", "--flag=-fa", "--flag", "off", "--dry-run"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    said = capsys.readouterr().out
    assert "llama-server -m x.gguf --host 127.0.0.1 --port 9001" in said and "-t 2" in said and said.rstrip().endswith("-fa off")


def converter(engines: Path, body: str) -> None:
    folder = install.ENGINES["llamacpp"].folder("llamacpp")
    (folder / "convert").mkdir(parents=True)
    (folder / install.DONE).write_text("{}")
    (folder / "convert" / "convert_hf_to_gguf.py").write_text(body)


def test_a_target_is_converted_once_and_anew_when_it_changes(engines, model):
    converter(engines, "import json, sys; open(sys.argv[sys.argv.index('--outfile') + 1], 'w').write(json.dumps(sys.argv))")
    out = to_gguf(model, "float32")
    words = json.loads(out.read_text())
    assert words[1] == str(model) and words[words.index("--outtype") + 1] == "f32"
    out.write_text("kept")
    assert to_gguf(model, "float32") == out and out.read_text() == "kept"
    assert to_gguf(model, "bfloat16") != out
    (model / "config.json").write_text('{"other": 1}')
    assert gguf_path(model, "float32") != out
    assert sorted(path.suffix for path in out.parent.iterdir()) == [".gguf", ".gguf", ".log", ".log"]


def test_a_failed_conversion_leaves_nothing_and_says_why(engines, model):
    converter(engines, "raise SystemExit('unknown architecture')")
    with pytest.raises(ValueError, match=r"converter failed with code 1: unknown architecture \(log: "):
        to_gguf(model)
    assert not list((engines / "gguf").glob("*.gguf"))


@pytest.fixture
def layered(tmp_path):
    folder = tmp_path / "layered"
    folder.mkdir()
    (folder / "config.json").write_text('{"num_hidden_layers": 30}')
    return folder


def test_vllm_gives_states_of_layers_by_its_own_ids(engines, layered, monkeypatch):
    """Ours: output of layer i; vLLM's: what goes into layer i, so one more, and 30 for the last of 30 layers."""
    monkeypatch.setenv("PYTHONPATH", "/mine")
    serving = Serving("vllm", layered, 1, taps=[1, 8, 28])
    command = serving.command(dry=True)
    draft = json.loads(follows(command, "--speculative-config"))
    assert draft["method"] == "extract_hidden_states" and draft["num_speculative_tokens"] == 1
    assert draft["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 9, 29, 30]
    transfer = json.loads(follows(command, "--kv-transfer-config"))
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": str(engines / "states")}
    assert "--no-enable-prefix-caching" in command
    places = serving.environment()["PYTHONPATH"].split(":")
    assert (Path(places[0]) / f"{transfer['kv_connector_module_path']}.py").is_file() and places[1] == "/mine"
    assert {path.name for path in Path(places[0]).glob("*.py")} <= {"specgraft_states.py", "__init__.py"}  # nothing that hides a package
    last = json.loads(follows(Serving("vllm", layered, 1, taps=[28, 29], states="/x").command(dry=True), "--speculative-config"))
    assert last["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [29, 30]
    assert "--kv-transfer-config" not in Serving("vllm", layered, 1).command(dry=True)


def test_the_connector_imports_nothing_of_specgraft_and_names_the_class(engines, layered):
    import ast

    from specgraft.engines.states import CONNECTOR

    tree = ast.parse((CONNECTOR / "specgraft_states.py").read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert json.loads(follows(Serving("vllm", layered, 1, taps=[1]).command(dry=True), "--kv-transfer-config"))["kv_connector"] in names
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} | {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert not any(name.startswith("specgraft") for name in modules if name)


def test_sglang_gives_states_by_our_ids(engines, layered):
    command = Serving("sglang", layered, 1, taps=[1, 8]).command(dry=True)
    at = command.index("--return-aux-hidden-state-layer-ids")
    assert command[at + 1 : at + 4] == ["1", "8", "29"] and follows(command, "--chunked-prefill-size") == "-1"
    assert "--enable-return-aux-hidden-states" in command and "--disable-radix-cache" in command


def test_taps_that_cannot_be(engines, layered, model):
    for taps in ([8, 1], [1, 1], [30], [-1, 2]):
        with pytest.raises(ValueError, match=r"--taps .*: name decoder layers of 0 to 29, each once, in rising order"):
            Serving("vllm", layered, 1, taps=taps).command(dry=True)
    with pytest.raises(ValueError, match="does not say how many layers"):
        Serving("vllm", model, 1, taps=[1]).command(dry=True)
    with pytest.raises(ValueError, match="llamacpp gives no hidden states of layers"):
        Serving("llamacpp", layered, 1, taps=[1])
    with pytest.raises(ValueError, match="--states is where vLLM leaves hidden states: give --taps"):
        Serving("vllm", layered, 1, states="/x")


@pytest.mark.parametrize(("given", "ids"), [("spread", [2, 9, 15, 21, 28, 30]), ("0,29", [1, 30])])
def test_serve_prints_the_layers(engines, layered, monkeypatch, capsys, given, ids):
    monkeypatch.setattr(sys, "argv", ["specgraft", "serve", "vllm", str(layered), "--taps", given, "--dry-run"])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().out
    assert not end.value.code and f'"eagle_aux_hidden_state_layer_ids": {ids}' in said and "PYTHONPATH=" in said


def test_serve_refuses_words_for_layers(engines, layered, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["specgraft", "serve", "vllm", str(layered), "--taps", "last", "--dry-run"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and "--taps 'last': write layer ids, such as 1,8,15, or spread" in capsys.readouterr().err
