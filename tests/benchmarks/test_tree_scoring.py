"""The tree-scoring benchmark: every number that the JSON promises, on a tiny hybrid; its float64 copy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "tree_scoring.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three GDN layers and one of full attention."""
    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2,
        mlp_only_layers=[0, 1, 2, 3], bos_token_id=None, eos_token_id=1, initializer_range=0.15,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("hybrid")
    Qwen3NextForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(path)
    return path


def test_every_number_is_there_and_the_scores_are_right(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "trees.json"
    options = ["--anchors", "4", "--width", "3", "--stem", "40", "--repeats", "2", "--reexec-repeats", "1", "--growth", "2", "4"]
    command = [sys.executable, str(BENCHMARK), str(folder), *options, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    (row,) = found["results"]
    assert row["kind"] == "qwen3_next" and 0 <= row["error_fp64"] < 1e-9
    assert row["ideal_ratio"] == max(row["ratios"][f"over_{who}"]["median"] for who in ("theirs", "ours"))
    assert row["reexec_ratio"] == min(row["ratios"][f"reexec_{who}"]["median"] for who in ("theirs", "ours"))
    assert row["peak_mib"] > 0 and row["noise"] >= 0 and len(row["runs"]) == 2
    grown = row["growth"]
    assert grown["anchors"] == [2, 4]
    assert all(len(grown[name]["seconds"]) == 2 and grown[name]["deviation"] >= 0 for name in ("nodes", "whole"))
    assert found["settings"]["stem"] == 40


def test_the_anchors_cover_the_stem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    from types import SimpleNamespace

    import tree_case

    _, tree = tree_case.draw(SimpleNamespace(vocab_size=9, device="cpu"), 64, 8, 3)
    assert (tree.anchors // 8).tolist() == list(range(8)) and tree.branches.shape == (8, 3)
