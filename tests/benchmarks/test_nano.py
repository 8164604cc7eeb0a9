"""Nano language models: the command on tiny sizes, its cache, its refusals, and the fast stand-ins that training uses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraft.records import Conversation
from specgraft.targets.embedded import HUB_ID, smollm2_folder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = [
    "--steps",
    "3",
    "--hidden",
    "64",
    "--layers",
    "4",
    "--vocabulary",
    "300",
    "--batch-tokens",
    "128",
    "--samples",
    "0",
]
ANSWER = "Bread needs flour, water, salt and time."


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regen folder of the embedded target: eight conversations, two of them held out."""
    if smollm2_folder() == HUB_ID:
        pytest.skip("the embedded target is not installed")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    folder = tmp_path_factory.mktemp("regen")
    for split, numbers in (("train", range(6)), ("heldout", range(6, 8))):
        lines = []
        for number in numbers:
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": f"How do I bake {number} loaves?"}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
            answer = tokenizer.encode(f"{number} loaves: {ANSWER}<|im_end|>")
            mask = [False] * len(prompt) + [True] * len(answer)
            row = Conversation(
                f"p{number}",
                f"f{number}",
                "en",
                "chat",
                split,
                prompt + answer,
                mask,
                len(prompt),
                0.0,
                1.0,
                0,
                "stop",
                "",
            )
            lines.append(json.dumps(row.to_json()))
        (folder / f"{split}-00000.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def nano(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import nano

    return nano


def build(nano: Any, *arguments: object) -> dict[str, Any]:
    args = nano.options().parse_args([str(one) for one in arguments])
    nano.check(args)
    return nano.build(args)


def test_a_folder_that_loads_and_is_not_trained_twice(nano: Any, answers: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "en.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Name a\u2028bird."}], "language": "en"}\n'
    )
    out = tmp_path / "models" / "full"
    first = build(nano, "full", out, "--answers", answers, "--prompts", prompts, *TINY)
    assert not first["cached"] and first["steps"] == 3 and first["texts"] == 6 and first["held_out"]["tokens"] > 0
    assert {path.name for path in out.parent.iterdir()} == {"full"}, "no temporary folder stays"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    turns = [{"role": "user", "content": "Bake  12 loaves,\ndon't"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nBake  12 loaves,\ndon't<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1 and 2 in ids and tokenizer.convert_tokens_to_ids("<|mask|>") == 3 and tokenizer.pad_token_id == 0
    assert (
        tokenizer.eos_token_id == model.generation_config.eos_token_id == 2
        and len(tokenizer) == model.config.vocab_size
    )

    weights = out / "model.safetensors"
    written = weights.stat().st_mtime_ns
    again = build(nano, "full", out, "--answers", answers, "--prompts", prompts, *TINY)
    assert again["cached"] and weights.stat().st_mtime_ns == written and again["digest"] == first["digest"]
    assert not build(nano, "full", out, "--answers", answers, "--prompts", prompts, *TINY, "--seed", "1")["cached"], (
        "other settings"
    )
    weights.unlink()
    assert not build(nano, "full", out, "--answers", answers, "--prompts", prompts, *TINY, "--seed", "1")["cached"], (
        "half a folder"
    )
    assert weights.is_file()


def test_a_run_that_fails_leaves_what_was_there(
    nano: Any, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "full"
    build(nano, "full", out, "--answers", answers, *TINY)
    before = (out / "nano.json").read_text()
    monkeypatch.setattr(
        nano.json, "dumps", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")) if k.get("indent") else "x"
    )
    with pytest.raises(OSError, match="disk full"):
        build(nano, "full", out, "--answers", answers, *TINY, "--seed", "1")
    assert (out / "nano.json").read_text() == before and {path.name for path in tmp_path.iterdir()} == {"full"}


@pytest.mark.parametrize("kind", ["gdn", "kda", "qsa"])
def test_what_runs_in_training_is_what_hugging_face_computes(nano: Any, kind: str) -> None:
    import nano_models

    config = nano_models.make_config(kind, 300, 64, 4, {"pad": 0, "end": 2})
    if kind == "qsa":
        config.indexer_n_heads = 16  # so many that no score is 0, as equal scores may be chosen from freely
    model = nano_models.make_model(config, 0).eval()
    ids = torch.randint(4, 300, (2, 75), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        with nano_models.fast(model):
            fast = model(input_ids=ids, use_cache=False).logits
        after = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(fast, plain, rtol=0, atol=2e-5)
    assert torch.equal(after, plain), "the stand-ins are gone"
    if kind == "qsa":
        import nano_train

        rows = [type("Row", (), {"ids": ids[0].tolist()})()]
        found = nano_train.sparsity(model, rows)
        assert found["queries_with_dropped_blocks"] == pytest.approx(40 / 75), (
            "from the 36th token on: nine blocks seen, eight read"
        )


def test_muon_makes_updates_orthogonal(nano: Any) -> None:
    import nano_muon

    for shape in ((3, 32, 64), (2, 64, 32)):
        update = nano_muon.orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        sizes = torch.linalg.svdvals(update)
        assert update.shape == shape and sizes.min() > 0.5 and sizes.max() < 1.3


def test_prompts_take_their_share_and_at_most_half_as_often(nano: Any) -> None:
    import nano_corpus

    text = nano_corpus.Text([], None)
    answered, bare = (
        [nano_corpus.Row([token] * 10, 5, text) for token in tokens] for tokens in (range(10, 20), range(20, 24))
    )
    stream = nano_corpus.batches(answered, bare, 0.5, 40, 0)
    seen: dict[int, int] = {}
    while min((seen.get(token, 0) for token in range(10, 20)), default=0) < 10:
        for token in next(stream)[:, 0].tolist():
            seen[token] = seen.get(token, 0) + 1
    assert all(seen[token] <= 6 for token in range(20, 24)), "a bare prompt once for every two passes over the answers"


def test_a_cut_answer_ends_with_a_sentence(nano: Any) -> None:
    import nano_corpus

    assert nano_corpus.finished("First comes this. Then that! And the") == "First comes this. Then that!"
    assert nano_corpus.finished("No end of a sentence in 3.5 here") == "No end of a sentence in 3.5 here"
    assert nano_corpus.repetition("a b c d a b c d a b c d".split()) == pytest.approx(1 - 4 / 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["full", "{tmp}/out", "--answers", "{tmp}/nowhere"], "nowhere: no greedy conversations"),
        (["full", "{tmp}/out", "--answers", "{tmp}", "--steps", "0"], "--steps 0: give a positive number"),
        (["full", "{tmp}/out", "--answers", "{tmp}", "--hidden", "100"], "multiple of 64"),
        (["gdn", "{tmp}", "--answers", "{tmp}"], "not of a nano model"),
        (["mamba", "{tmp}/out", "--answers", "{tmp}"], "invalid choice: 'mamba'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    arguments = [one.replace("{tmp}", str(tmp_path)) for one in arguments]
    done = subprocess.run([sys.executable, str(BENCHMARKS / "nano.py"), *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
    assert (
        "Traceback" not in done.stderr
        and (tmp_path / "letter.txt").read_text() == "mine"
        and not (tmp_path / "out").exists()
    )
