"""Tiny random models for tests: a Llama target behind the real `Target`, and a drafter for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.registry import build
from specgraft.targets.attention import NAME
from specgraft.targets.model import Target


class StubTokenizer:
    """As much of a tokenizer as a target needs: token i is the character with code 256 + i."""

    def __init__(self, vocab: int, eos_token_id: int) -> None:
        self.vocab, self.eos_token_id = vocab, eos_token_id
        self.pad_token_id: int | None = None
        self.chat_template = "stub"

    def get_vocab(self) -> dict[str, int]:
        return {chr(256 + index): index for index in range(self.vocab)}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            chr(256 + int(index)) for index in ids if not (skip_special_tokens and index == self.eos_token_id)
        )


def make_target(
    vocab: int = 64,
    layers: int = 3,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    end: int | list[int] = 1,
    max_positions: int = 256,
    spread: float = 0.1,
    markov: float = 20.0,
) -> Target:
    """A random Llama of this shape; `spread` is the deviation of its weights, `end` its end token(s).

    The embedding is scaled by `markov`: the larger, the more the next token depends on the last one alone.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        initializer_range=spread,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,
        attn_implementation=NAME,
    )
    model: Any = LlamaForCausalLM(config).to(dtype)
    model.get_input_embeddings().weight.data *= markov
    model.generation_config.eos_token_id = end
    return Target(
        model, StubTokenizer(vocab, end if isinstance(end, int) else end[0]), Path("tiny"), torch.device("cpu")
    )


def make_drafter(
    target: Target,
    draft_tokens: int = 4,
    layers: int = 2,
    taps: Sequence[int] | None = None,
    mask_token_id: int = 0,
    rank: int = 64,
    seed: int = 1,
    bigram: float = 5.0,
    kind: str = "dspark",
    **more: Any,
) -> Drafter:
    """A random drafter for this target. `bigram` > 0 plants that much of the target's own law after single tokens in the
    Markov head (rank >= vocabulary), so that drafts are accepted now and then."""
    torch.manual_seed(seed)
    config = DrafterConfig(
        kind=kind,
        draft_tokens=draft_tokens,
        layers=layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate=2 * target.hidden_size,
        eps=1e-5,
        rope_theta=10_000.0,
        max_positions=target.config.max_position_embeddings,
        taps=tuple(taps) if taps is not None else tuple(range(target.num_layers)),
        target_layers=target.num_layers,
        mask_token_id=mask_token_id,
        **{"markov_rank": rank, "confidence": True, **more} if kind == "dspark" else more,
    )
    drafter = build(config).to(target.dtype).requires_grad_(False).eval()
    if bigram and drafter.markov_head is not None:
        assert rank >= target.vocab_size
        ids = torch.arange(target.vocab_size)[:, None]
        step = target.forward(ids, target.cache(target.vocab_size, 1))
        law = target.logits(step.last[:, 0]).to(target.dtype)  # [V, V]
        drafter.markov_head.markov_w1.weight.zero_().diagonal().fill_(1.0)
        drafter.markov_head.markov_w2.weight.zero_()[:, : target.vocab_size] = bigram * law.T
    return drafter


@pytest.fixture(scope="session")
def tiny_target() -> Callable[..., Target]:
    """Builds a tiny target; arguments as `make_target`."""
    return make_target


@pytest.fixture(scope="session")
def tiny_drafter() -> Callable[..., Drafter]:
    """Builds a tiny drafter; arguments as `make_drafter`."""
    return make_drafter


TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, a few merges ("a" + "b" is one token) and four special tokens: 264 ids."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("a", "b"), ("t", "h"), ("th", "e"), ("i", "n")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|start|>", "<|end|>", "<|pad|>", "<|mask|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>", mask_token="<|mask|>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder that `load_target` reads: a random Llama of 4 layers and 288 rows of vocabulary, byte-level
    tokens, a chat template. `<|mask|>` is the unused id for the drafter's open slots (`tiny_mask_id`)."""
    folder = tmp_path_factory.mktemp("tiny") / "target"
    tokenizer = make_tokenizer()
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Any = LlamaForCausalLM(config)
    model.get_input_embeddings().weight.data *= 5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_mask_id() -> int:
    """The id of `<|mask|>` in `tiny_folder`."""
    return int(make_tokenizer().convert_tokens_to_ids("<|mask|>"))


RUN_FILE = """
[run]
name = "pilot"
root = "{root}"
device = "cpu"
threads = 1

[target]
id = "{folder}"
dtype = "float32"
mask_token_id = {mask}

[prompts]
source = "{source}"
train = 10
held_out = 5
held_out_share = 0.3

[regen]
max_new_tokens = 20
batch = 8
group = 8
greedy_share = 0.5

[capture]
taps = [0, 1, 2]

[drafters]
draft_tokens = 2
layers = 1
markov_rank = 16

[train]
steps = 8
rows = 4
anchors = 8
compute = "float32"
checkpoint_every = 4
validate_every = 4
validate_rows = 4

[evaluate]
prompts = 5
sampled_prompts = 2
max_new_tokens = 12
batch = 4
speed_prompts = 1
speed_dtype = "float32"
examples = 1

[check]
overfit_steps = 300
overfit_tokens = 16
"""


@pytest.fixture(scope="session")
def make_run_file(tiny_folder: Path, tiny_mask_id: int) -> Callable[[Path], Path]:
    """Writes run.toml and its prompts into a folder; runs go to `runs` beside it."""

    def make(folder: Path) -> Path:
        source = folder / "prompts.jsonl"
        kinds = [(language, domain) for language in ("en", "ko") for domain in ("chat", "code")]
        rows = []
        for number in range(36):
            language, domain = kinds[number % 4]
            text = f"{number}: " + ("write the name", "안녕", "def f(x):", "count in ab")[number % 4]
            rows.append(
                {"id": f"p{number}", "family": f"f{number // 2}", "language": language, "domain": domain,
                 "messages": [{"role": "user", "content": text}]}
            )  # fmt: skip
        source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        path = folder / "run.toml"
        text = RUN_FILE.format(root=folder / "runs", folder=tiny_folder, mask=tiny_mask_id, source=source)
        path.write_text(text, encoding="utf-8")
        return path

    return make
