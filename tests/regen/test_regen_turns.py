"""Turns: which are answered, what the next prompt is, and what becomes one row or several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from templates_by_hand import answer, family, result, system, template_of, tok, user

from specgraft.check.token_identity import joined, shard_identity, token_identity
from specgraft.records import Conversation, Prompt, Turn, ids_digest
from specgraft.regen.dialogue import Dialogue, message_of, script, without_cut
from specgraft.regen.recorded import recorded_rows
from specgraft.regen.render import Chat
from specgraft.regen.renders import Renders
from specgraft.regen.sampling import Sampling

END, EOS = 261, 264
LAW = Sampling(0.0, 1.0, 0, 16)


def chat_of(name: str = "plain", thinking: str = "template") -> Chat:
    return Chat(tok(template_of(name)), (END, EOS), thinking)


def prompt_of(*messages: dict[str, Any], name: str = "p", domain: str = "chat") -> Prompt:
    return Prompt(name, name, "en", domain, messages)


def ids_of(text: str, end: int = END) -> list[int]:
    """Bytes one by one, as a target may write them, then the end token."""
    return [*text.encode(), end]


def talk(chat: Chat, prompt: Prompt, *answers: list[int], context: int | None = None, reason: str = "stop") -> Dialogue:
    dialogue = Dialogue(chat, prompt, "train", LAW, 500, context)
    for ids in answers:
        dialogue.hear(ids, reason)
    return dialogue


def shown(chat: Chat, row: Conversation) -> str:
    """The row as text, with brackets around what is supervised."""
    text, inside = "", False
    for token, mine in zip(row.input_ids, row.loss_mask, strict=True):
        text += ("⟦" if mine else "⟧") * (mine != inside) + chat.tokenizer.decode([token])
        inside = mine
    return text + "⟧" * inside


def proved(chat: Chat, prompt: Prompt, rows: list[Conversation]) -> str:
    renders = Renders(chat, {"train": [prompt]})
    outcome = token_identity(rows, renders, chat.end_ids, renders.recorded)
    return "" if outcome.passed else outcome.detail


# --- which turns


@pytest.mark.parametrize(
    ("domain", "messages", "expected"),
    [
        ("chat", "u", ["u"]),
        ("chat", "su", ["su"]),
        ("chat", "uu", ["u", "u"]),
        ("chat", "uau", ["u", "u"]),
        ("chat", "uaua", ["u", "u"]),
        ("chat", "susu", ["su", "su"]),
        ("tool", "uau", ["u", "u"]),
        ("tool", "uatau", ["uatau"]),
        ("tool", "uatauu", ["uatau", "u"]),
        ("tool", "uat", ["uat"]),
        ("tool", "uata", ["uat"]),
        ("agent", "suaua", ["suau"]),
        ("agent", "suau", ["suau"]),
        ("agent", "u", ["u"]),
    ],
)
def test_recorded_answers_are_written_anew_but_for_histories(domain: str, messages: str, expected: list[str]) -> None:
    makes = {"u": user, "s": system, "a": answer, "t": result}
    prompt = prompt_of(*(makes[kind](f"{place}") for place, kind in enumerate(messages)), domain=domain)
    parts = script(prompt)
    assert ["".join({"tool": "t"}.get(m["role"], m["role"][0]) for m in part) for part in parts] == expected
    kept = [message for part in parts for message in part]
    assert kept == [message for message in prompt.messages if message in kept]  # in their order, each once


def test_calls_without_a_result_make_a_history_too() -> None:
    assert len(script(prompt_of(user("x"), answer(None, arguments={"n": 1}), user("y"), domain="tool"))) == 1


@pytest.mark.parametrize(
    ("messages", "words"),
    [((answer("a"), user("x")), "opens with the assistant"), ((user("x"), system("s")), "the last message is from system"), ((answer("a"),), "no turn")],
)  # fmt: skip
def test_what_asks_nothing_is_refused_by_name(messages: tuple[dict[str, Any], ...], words: str) -> None:
    with pytest.raises(ValueError, match=f"prompt p: .*{words}"):
        script(prompt_of(*messages))


# --- rows


def test_turns_whose_render_goes_on_share_a_row() -> None:
    chat, prompt = chat_of(), prompt_of(user("x"), answer("old"), user("y"))
    dialogue = talk(chat, prompt, ids_of("ok"))
    assert chat.tokenizer.decode(dialogue.asked) == "<|user|>x<|end|><|assistant|>ok<|end|><|user|>y<|end|><|assistant|>"
    dialogue.hear(ids_of("fine"), "stop")
    assert dialogue.asked is None
    (row,) = dialogue.conversations()
    assert shown(chat, row) == "<|user|>x<|end|><|assistant|>⟦ok<|end|>⟧<|user|>y<|end|><|assistant|>⟦fine<|end|>⟧"
    assert (row.prompt_id, row.source_id, row.row, row.prompt_length) == ("p", "p", 1, 4)
    assert row.turns == (Turn(4, 7, "stop", ids_digest(ids_of("ok"))), Turn(11, 16, "stop", ids_digest(ids_of("fine"))))
    assert row.digest == ids_digest(ids_of("ok") + ids_of("fine"))
    assert Conversation(**row.to_json()) == row
    assert not proved(chat, prompt, [row])


def test_a_row_of_one_turn_is_stored_as_it_always_was() -> None:
    (row,) = talk(chat_of(), prompt_of(user("x")), ids_of("ok")).conversations()
    assert row.turns == () and row.spans == (Turn(4, 7, "stop", row.digest),)
    assert not {"row", "turns", "answers"} & row.to_json().keys()


def test_reasoning_that_the_template_drops_begins_a_new_row() -> None:
    mine = family("qwen3")
    chat, end = Chat(mine.tokenizer, mine.end_ids, "on"), mine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    think, unthink = (chat.tokenizer.convert_tokens_to_ids(mark) for mark in ("<think>", "</think>"))
    wrote = [think, *b"\nsum\n", unthink, *b"\n\n4", end]
    prompt = prompt_of(user("2+2?"), user("3+3?"))
    first, second = talk(chat, prompt, wrote, [think, *b"\nmore\n", unthink, *b"\n\n6", end]).conversations()
    assert (first.prompt_id, second.prompt_id, second.source_id, second.row) == ("p", "p#2", "p", 2)
    assert first.input_ids[first.prompt_length :] == wrote and not first.turns
    text = shown(chat, second)
    assert text.count("⟦") == 1 and "sum" not in text and "4<|im_end|>" in text.split("⟦")[0]
    assert not proved(chat, prompt, [first, second])
    assert "prompt ids differ" in proved(chat, prompt, [second])  # a row of which the one before is missing


@pytest.mark.parametrize(
    ("name", "wrote", "rows"),
    [
        ("plain", ids_of("abc"), 2),  # the text "ab" is one token
        ("plain", [256, ord("c"), END], 1),
        ("plain", ids_of("ok", EOS), 2),  # it ended with the end of text, the template writes the end of turn
        ("rewrite", ids_of("ok "), 2),
    ],
)
def test_r11_ids_that_are_not_those_of_their_text_are_kept_and_a_new_row_begins(name: str, wrote: list[int], rows: int) -> None:
    chat, prompt = chat_of(name), prompt_of(user("x"), user("y"))
    found = talk(chat, prompt, wrote, ids_of("fine")).conversations()
    assert len(found) == rows
    assert found[0].input_ids[found[0].prompt_length :][: len(wrote)] == wrote
    assert not any(found[-1].loss_mask[: found[-1].spans[-1].start]) or rows == 1
    assert not proved(chat, prompt, found)
    assert sum(sum(row.loss_mask) for row in found) == len(wrote) + 5  # every generated id once


def test_what_a_special_token_says_is_no_text() -> None:
    tokenizer = tok(template_of("think"))
    think, unthink, mask = (tokenizer.convert_tokens_to_ids(mark) for mark in ("<think>", "</think>", "<|mask|>"))
    assert message_of(tokenizer, [*b"a", mask, *b"b", END], (END,)) == {"role": "assistant", "content": "ab"}
    assert message_of(tokenizer, [*b"why", unthink, *b"4", END], (END,)) == answer("4", "why")
    assert message_of(tokenizer, [think, *b"why", unthink, *b"4"], (END,)) == answer("4", "why")
    assert message_of(tokenizer, [END], (END,)) == answer("")


def test_harmony_channels_are_reasoning_and_answer() -> None:
    marks = ("<|channel|>", "<|message|>", "<|start|>", "<|return|>")
    tokenizer = tok(template_of("plain"), extra=marks)
    channel, message, start, stop = (tokenizer.convert_tokens_to_ids(mark) for mark in marks)
    ids = [channel, *b"analysis", message, *b"hm", END, start, *b"assistant", channel, *b"final", message, *b"4", stop]
    assert message_of(tokenizer, ids, (stop,)) == answer("4", "hm")


# --- where a dialogue ends


def test_r10_nothing_is_put_behind_a_cut_answer_and_no_end_token_is_added() -> None:
    chat, prompt = chat_of(), prompt_of(user("x"), user("y"))
    dialogue = talk(chat, prompt, list(b"cut here"), reason="length")
    assert dialogue.asked is None and dialogue.stopped == "behind a cut answer"
    (row,) = dialogue.conversations()
    assert row.input_ids[-1] == ord("e") and row.finish_reason == "length" and not row.turns
    assert not proved(chat, prompt, [row]) and without_cut(row) is None


def test_cut_answers_are_taken_off_and_the_others_stay() -> None:
    chat, prompt = chat_of(), prompt_of(user("x"), user("y"), user("z"))
    dialogue = talk(chat, prompt, ids_of("ok"))
    dialogue.hear(list(b"and so on"), "length")
    (row,) = dialogue.conversations()
    kept = without_cut(row)
    assert kept is not None and shown(chat, kept) == "<|user|>x<|end|><|assistant|>⟦ok<|end|>⟧"
    assert (kept.finish_reason, kept.turns, kept.digest) == ("stop", (), ids_digest(ids_of("ok")))
    assert not proved(chat, prompt, [row]) and not proved(chat, prompt, [kept])
    assert without_cut(kept) is kept


def test_a_full_context_ends_a_dialogue() -> None:
    dialogue = talk(chat_of(), prompt_of(user("x"), user("y" * 20)), ids_of("ok"), context=30)
    assert dialogue.asked is None and "context is full" in dialogue.stopped
    assert len(dialogue.conversations()) == 1
    with pytest.raises(ValueError, match="prompt p: prompt and answer may take 20 tokens, the target's context is 19"):
        talk(chat_of(), prompt_of(user("x")), context=19)


def test_a_later_turn_that_the_template_refuses_is_refused_before_the_first_answer() -> None:
    with pytest.raises(ValueError, match=r"prompt p: .*no system message"):
        talk(chat_of("strict"), prompt_of(user("x"), system("s"), user("y")))
    assert talk(chat_of("strict"), prompt_of(user("x"), user("y")), ids_of("ok")).asked  # two users running are two turns


# --- recorded answers


def test_r14_recorded_answers_are_labelled_and_are_the_templates_own_render() -> None:
    chat, prompt = chat_of(), prompt_of(user("x"), answer("ok"), user("y"), answer("no"))
    (row,) = rows = recorded_rows(chat, prompt, "train", 100, None)
    assert shown(chat, row) == "<|user|>x<|end|><|assistant|>⟦ok<|end|>⟧<|user|>y<|end|><|assistant|>⟦no<|end|>⟧"
    assert row.answers == "data set" and row.temperature != 0 and Conversation(**row.to_json()) == row
    renders = Renders(chat, {"train": [prompt]})
    outcome = token_identity(rows, renders, chat.end_ids, renders.recorded)
    assert outcome.passed and "answers: data set" in outcome.detail
    assert "differ from the rendered conversation" in proved(chat, prompt, [replace(row, input_ids=[*row.input_ids[:-2], 99, END])])
    for words, limits in (("prompts.max_tokens allows 3", (3, None)), ("the target's context is 9", (100, 9))):
        with pytest.raises(ValueError, match=f"prompt p: .*{words}"):
            recorded_rows(chat, prompt, "train", *limits)


# --- the gate


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: {"input_ids": [*row.input_ids[:9], 99, *row.input_ids[10:]]}, "answer 2: prompt ids differ from the rendered prompt at 9"),
        (lambda row: {"input_ids": [*row.input_ids[:12], 99, *row.input_ids[13:]]}, "answer 2: generated ids are not the ones"),
        (lambda row: {"loss_mask": [False] * 11 + row.loss_mask[11:]}, "loss mask is not exactly the generated ids"),
        (lambda row: {"loss_mask": [False] * 4 + [True] * (len(row.loss_mask) - 4)}, "loss mask is not exactly the generated ids"),
        (lambda row: {"turns": row.turns[1:]}, "prompt ids differ"),
        (lambda row: {"turns": row.turns[:1]}, "loss mask is not exactly the generated ids"),
        (lambda row: {"turns": (replace(row.turns[0], finish_reason="length"), row.turns[1])}, "answer 1: cut by the limit"),
        (lambda row: {"digest": "0"}, "digest or finish reason of the row"),
    ],
)  # fmt: skip
def test_faults_of_a_later_answer_are_seen(change: Any, words: str) -> None:
    chat, prompt = chat_of(), prompt_of(user("x"), user("y"))
    (row,) = talk(chat, prompt, ids_of("ok"), ids_of("fine")).conversations()
    assert words in proved(chat, prompt, [replace(row, **change(row))])


def test_a_sample_is_the_same_every_time_and_takes_whole_prompts() -> None:
    chat = chat_of()
    prompts = [prompt_of(user("x"), user("y"), name=f"p{number}") for number in range(30)]
    rows = [row for prompt in prompts for row in talk(chat, prompt, ids_of("ok", EOS), ids_of("no")).conversations()]
    assert len(rows) == 60
    seen: list[str] = []
    renders = Renders(chat, {"train": prompts})

    def render(name: str, answers: Any = ()) -> list[int]:
        seen.append(name)
        return renders(name, answers)

    outcome = token_identity(rows, render, chat.end_ids, sample=7)
    assert outcome.passed and "14 rows (of 60, a sample), " in outcome.detail and len(set(seen)) == 7
    first = set(seen)
    seen.clear()
    token_identity(rows[::-1], render, chat.end_ids, sample=7)
    assert set(seen) == first
    assert "60 rows, " in token_identity(rows, render, chat.end_ids).detail


def test_stored_rows_are_compared_with_the_conversations() -> None:
    (row,) = talk(chat_of(), prompt_of(user("x"), user("y")), ids_of("ok"), ids_of("no")).conversations()
    ids, mask = row.input_ids, row.loss_mask
    fine = ("train-00000", "p", ids, mask)
    assert shard_identity([fine, ("train-00001", "gone", [1], [True])], {"p": row}).passed
    assert shard_identity([("a", "p", ids[:7], mask[:7])], {"p": row}).passed  # cut by capture
    for stored in ([9, *ids[1:]], [*ids, 5], []):
        assert "a, p: its ids" in shard_identity([("a", "p", stored, mask)], {"p": row}).detail
    for wrong in ([True] * len(mask), mask[:-1]):
        assert "a, p: its mask" in shard_identity([("a", "p", ids, wrong)], {"p": row}).detail
    none = shard_identity([], {"p": row})
    assert not none.passed and "not run" in none.detail
    both = joined(token_identity([], lambda name: [], ()), shard_identity([fine], {"p": row}))
    assert not both.passed and "not run: no conversations" in both.detail
