"""Faults R1 to R9 of rows, templates and masks, each with its own trigger, and what else templates do to answers."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from templates_by_hand import SHAPES, TOOL, answer, family, result, system, template_of, tok, tools_of, user

from specgraft.records import Prompt
from specgraft.regen.messages import Calls
from specgraft.regen.render import Chat, render


def chat(name: str, thinking: str = "template", ends: tuple[int, ...] = (264, 261)) -> Chat:
    return Chat(tok(template_of(name)), ends, thinking)


def supervised(mine: Chat, messages: list[dict[str, Any]], tools: Any = None) -> list[tuple[str, int]]:
    """Text and number of the supervised tokens of every row."""
    found = []
    for row in mine.answered(messages, tools):
        ids = [token for token, on in zip(row.ids, row.mask, strict=True) if on]
        found.append((mine.tokenizer.decode(ids), len(ids)))
    return found


def test_tok_is_the_tokenizer_of_the_fault_list() -> None:
    tokenizer = tok(template_of("plain"))
    assert tokenizer.encode("ab") == [256] and tokenizer.encode("ba") == [98, 97]
    assert tokenizer.encode("<|end|><think></think><|eos|><|mask|>") == [261, 262, 263, 264, 265]
    assert len(tokenizer) == 266


def test_r1_real_reasoning_is_supervised() -> None:
    [(text, count)] = supervised(chat("think", "on"), [user("2+2?"), answer("4", "two plus two")])
    assert text == "two plus two</think>4<|end|>" and count == len("two plus two") + 3
    for name in ("reasoning", "thinking"):  # other names of the field
        message = {"role": "assistant", "content": "4", name: "two plus two"}
        assert supervised(chat("think", "on"), [user("2+2?"), message])[0][0] == text


def test_r2_the_empty_think_block_of_the_prompt_is_not_supervised() -> None:
    for thinking in ("off", "template", "on"):  # the row's own mode counts, whatever the run's
        assert supervised(chat("think", thinking), [user("2+2?"), answer("4")]) == [("4<|end|>", 2)]


def test_r2_an_empty_block_of_a_template_that_prints_no_reasoning_is_not_supervised() -> None:
    template = template_of("plain").replace("{{ message.content }}", "{% if message.role == 'assistant' %}<think>\n</think>\n{% endif %}{{ message.content }}")
    mine = Chat(tok(template), (261,))
    assert supervised(mine, [user("x"), answer("ok"), user("y"), answer("Quite")]) == [("ok<|end|>Quite<|end|>", 9)]


def test_r3_text_that_the_template_rewrites_is_not_looked_for() -> None:
    assert supervised(chat("trim"), [user("  hi  "), answer("ok")]) == [("ok<|end|>", 3)]
    # the same words before the answer change nothing
    assert supervised(chat("trim"), [user("ok<|end|>"), answer("ok"), user("ok"), answer("ok")]) == [("ok<|end|>ok<|end|>", 6)]


def test_r4_the_mask_is_neither_all_zero_nor_all_one() -> None:
    mine = chat("plain")
    [row] = mine.answered([user("x"), answer("ok")])
    assert row.ids == [257, ord("x"), 261, 258, ord("o"), ord("k"), 261]
    assert row.mask == [False] * 4 + [True] * 3
    library = mine.tokenizer.apply_chat_template(
        [user("x"), answer("ok")], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    assert sum(library["assistant_masks"]) == 0  # what the library says of a template without generation tags
    with pytest.raises(ValueError, match="no supervised token"):
        mine.answered([user("x"), answer("")])  # an empty answer is nothing to learn
    with pytest.raises(ValueError, match="no assistant turn"):
        mine.answered([user("x")])


def test_r5_end_of_turn_is_not_the_end_of_text_and_answers_repeat() -> None:
    messages = [user("x"), answer("ok"), user("y"), answer("ok")]
    assert supervised(chat("plain"), messages) == [("ok<|end|>ok<|end|>", 6)]
    # end of turn missing among the target's end tokens: still the answers with their ends
    assert supervised(chat("plain", ends=(264,)), messages) == [("ok<|end|>ok<|end|>", 6)]


@pytest.mark.parametrize("arguments", [{"n": 1}, '{"n": 1}', '{"n":1}'])
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), (TOOL,)])
@pytest.mark.parametrize("content", [None, ""])
def test_r6_tool_rows_keep_calls_and_results(tools: Any, arguments: Any, content: Any) -> None:
    mine = chat("tool")
    messages = [user("x"), answer(content, arguments=arguments), result("7"), answer("7")]
    assert supervised(mine, messages, tools) == [('<call>f {"n": 1}</call><|end|>7<|end|>', 23 + 1 + 2)]  # 6 f 1 8 7, end; 7, end
    expected = mine.tokenizer.apply_chat_template(SHAPES["tools"], tools=[TOOL], tokenize=True, return_dict=False)
    assert mine.answered(messages, tools)[0].ids == expected
    assert "<call>" not in mine.tokenizer.decode(mine.prompt(messages[:1], tools))


def test_r6_a_template_without_tool_calls_refuses_them() -> None:
    with pytest.raises(ValueError, match="prints no tool calls, they would be lost"):
        chat("plain").prompt([user("x"), answer("", arguments={"n": 1}), result("7")], None)


def test_r6_what_the_template_drops_of_an_answer_is_not_taught_as_an_answer() -> None:
    mine = family("llama3")
    with pytest.raises(ValueError, match="drops the recorded text beside a tool call"):
        Chat(mine.tokenizer, mine.end_ids).answered([user("x"), answer("let me see", arguments={"n": 1})], [TOOL])
    mine = family("harmony")
    twice = answer(None, arguments={"n": 1})
    twice["tool_calls"] = [*twice["tool_calls"], {**twice["tool_calls"][0], "id": "call00002"}]
    with pytest.raises(ValueError, match="drops the recorded second tool call"):
        Chat(mine.tokenizer, mine.end_ids).answered([user("x"), twice], [TOOL])


def test_r7_system_text_stands_once() -> None:
    mine = chat("default_system")
    given = mine.tokenizer.decode(mine.answered([system("S1"), user("x"), answer("ok")])[0].ids)
    default = mine.tokenizer.decode(mine.answered([user("x"), answer("ok")])[0].ids)
    assert (given.count("S1"), given.count("D")) == (1, 0)
    assert default.count("D") == 1


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([answer("ok"), user("x"), answer("ok")], "opens with the assistant"),
        ([user("x"), user("y"), answer("ok")], "two user turns running"),
        ([system("S"), user("x"), answer("ok")], "no system message"),
        ([user("x"), {"role": "my-model", "content": "ok"}, user("y"), answer("ok")], "unknown role my-model"),
    ],
)
def test_r8_an_odd_row_has_its_own_reason_in_one_line(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        chat("strict").answered(messages)
    assert "\n" not in str(caught.value)


def test_r8_a_trailing_user_turn_is_left_out() -> None:
    whole, cut = (chat("strict").answered(messages) for messages in (SHAPES["trailing"], SHAPES["single"]))
    assert whole == cut


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ([{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "a.png"}}], "image_url"),
        ([{"type": "input_audio", "input_audio": {}}], "input_audio"),
        ([{"type": "image"}], "image"),
    ],
)
def test_pictures_are_refused_in_one_line(content: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"message 0 holds {kind}: text only, remove pictures"):
        chat("plain").prompt([{"role": "user", "content": content}])


def test_text_parts_are_one_text_as_servers_join_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat("plain").prompt([{"role": "user", "content": parts}]) == chat("plain").prompt([user("a\nb")])


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("qwen3", Calls(True, False)), ("llama3", Calls(True, False)), ("tool", Calls(True, False)), ("harmony", Calls(True, False)),
        ("deepseek", Calls(False, False)), ("chatml", Calls(True, True)),
    ],
)  # fmt: skip
def test_arguments_and_null_content_are_as_the_template_wants_them(name: str, calls: Calls) -> None:
    mine = family(name)
    template = mine.tokenizer.chat_template
    if name == "chatml":  # one that adds content to text
        mine.tokenizer.chat_template = template.replace("{%- if message['content'] %}", "{%- if message['content'] + '' == message['content'] %}")
    assert Chat(mine.tokenizer, mine.end_ids).calls == calls


def test_an_end_token_inside_an_answer_ends_it() -> None:
    assert supervised(chat("plain"), [user("x"), answer("a<|end|>b")]) == [("a<|end|>", 2)]


def test_the_prompt_of_an_answer_is_what_precedes_its_span() -> None:
    """Rows of recorded answers and prompts for new ones are the same render."""
    for name in ("plain", "llama3", "mistral", "phi", "exaone", "think", "tool"):
        mine = family(name)
        thinking = "off" if name == "think" else "template"
        made = Chat(mine.tokenizer, mine.end_ids, thinking)
        shape = "tools" if name == "tool" else "twice"
        for row in made.answered(SHAPES[shape], tools_of(shape)):
            for turn in row.turns:
                prompt = made.prompt(SHAPES[shape][:turn], tools_of(shape))
                assert row.ids[: len(prompt)] == prompt and row.mask[len(prompt)] and not row.mask[len(prompt) - 1]


def test_thinking_is_the_templates_switch_and_part_of_the_digest() -> None:
    made = {thinking: chat("think", thinking) for thinking in ("template", "on", "off")}
    ends = {thinking: made[thinking].prompt([user("x")])[-2:] for thinking in made}
    assert ends == {"template": [258, 262], "on": [258, 262], "off": [262, 263]}
    assert len({mine.digest for mine in made.values()}) == 3
    for thinking in ("on", "off"):
        with pytest.raises(ValueError, match=f'regen.thinking="{thinking}": .* no such switch'):
            chat("plain", thinking)


def test_the_digest_is_of_the_template_text() -> None:
    assert chat("plain").digest == chat("plain").digest != chat("trim").digest


def test_a_template_that_prints_the_day_renders_the_same_tomorrow() -> None:
    mine = family("llama3")
    text = mine.tokenizer.decode(Chat(mine.tokenizer, mine.end_ids).prompt([user("x")]))
    assert "Today Date: 15 Jan 2025\n" in text


def test_a_missing_template_is_one_line() -> None:
    tokenizer = copy.deepcopy(tok(template_of("plain")))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template: add chat_template\.jinja"):
        Chat(tokenizer, (261,))


def test_render_of_a_prompt_is_that_of_the_chat() -> None:
    mine = chat("think", "off")
    prompt = Prompt("p", "p", "en", "chat", (user("x"),))
    assert render(mine.tokenizer, prompt, 64, "off") == mine.prompt(prompt.messages) != render(mine.tokenizer, prompt, 64)
    with pytest.raises(ValueError, match=r"prompt p: 4 tokens, prompts\.max_tokens allows 3"):
        render(chat("plain").tokenizer, prompt, 3)
