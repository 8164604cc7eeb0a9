"""English chat families: tasks on a given text."""

from __future__ import annotations

from .en_texts import MESSAGES, PARAGRAPHS, SENTENCES
from .en_words import SYSTEM, words
from .family import Family

_LANGUAGES = words("French|Spanish|German|Italian|Portuguese|Dutch|Korean|Japanese")
_STYLES = words(
    "in a more formal way|in a friendlier tone|in fewer words|in simpler words|more politely|as a "
    "question|in the passive voice|in the past tense|as a newspaper headline"
    "|as if a pirate said it|so that a child understands it|in a more exciting way|in the future "
    "tense|with a sad tone"
)

FAMILIES = (
    Family(
        "summarise",
        (
            "Summarise this paragraph in one sentence:\n\n{text}",
            "Summarize the following text in {n} bullet points.\n\n{text}",
            "{text}\n\nWhat is the main point of this text?",
            "TL;DR:\n{text}",
            "Give this paragraph a title and a one-line summary.\n\n{text}",
            'Shorten this to about twenty words:\n\n"{text}"',
        ),
        {"text": PARAGRAPHS, "n": ["two", "three", "four"]},
        SYSTEM,
        0.15,
    ),
    Family(
        "read-answer",
        (
            "Read the text and write three questions about it.\n\n{text}",
            "Which facts does this text state? List them.\n\n{text}",
            "{text}\n\nWhat happened first, and what happened because of it?",
            "Extract all names, places and numbers from the text.\n\n{text}",
            "Based only on the text below, {ask}\n\n{text}",
        ),
        {
            "text": PARAGRAPHS,
            "ask": [
                "who or what is it about?",
                "what problem is described?",
                "what might happen next?",
                "why does it matter?",
            ],
        },
        SYSTEM,
        0.2,
    ),
    Family(
        "rewrite",
        (
            "Rewrite this sentence {style}: {text}",
            "{text}\n\nSay this {style}.",
            'Rewrite the following {style}. Keep the meaning.\n\n"{text}"',
        ),
        {"text": SENTENCES, "style": _STYLES},
    ),
    Family(
        "translate",
        (
            "Translate into {to}: {text}",
            'How do you say "{text}" in {to}?',
            "Translate the sentence to {to} and explain each word.\n\n{text}",
            'Give me a formal and an informal translation into {to} of: "{text}"',
        ),
        {"text": SENTENCES, "to": _LANGUAGES},
        SYSTEM,
        0.1,
    ),
    Family(
        "proofread",
        (
            "Correct the mistakes in this message:\n\n{text}",
            "Proofread this and list what you changed.\n{text}",
            'Is this correct English? "{text}"',
            "Fix spelling and grammar, but keep my style: {text}",
            "Rewrite this for {who}: {text}",
        ),
        {
            "text": [m[1] for m in MESSAGES],
            "who": ["my boss", "a customer", "a close friend", "a government office", "my teacher"],
        },
    ),
    Family(
        "reply",
        (
            "I received this message. Write a {tone} reply.\n\n{text}",
            'How should I answer this? "{text}"',
            "Reply to this message and say {answer}:\n{text}",
            "What does the sender of this message want?\n\n{text}",
        ),
        {
            "text": [m[0] for m in MESSAGES],
            "tone": ["polite", "short", "friendly", "firm", "grateful"],
            "answer": ["yes", "no", "that I need more time", "that we should talk on the phone"],
        },
        SYSTEM,
        0.1,
    ),
    Family(
        "sentiment",
        (
            "Classify this message as urgent or not urgent, and say why.\n\n{text}",
            "Is the tone of this message positive, negative or neutral?\n{text}",
            'Sort this into one of: request, complaint, thanks, information. Message: "{text}"',
            'Answer with one word. How does the writer feel? "{text}"',
        ),
        {"text": [m[0] for m in MESSAGES] + SENTENCES},
        SYSTEM,
        0.2,
    ),
    Family(
        "to-format",
        (
            "Turn this text into {form}:\n\n{text}",
            "Rewrite this as {form}.\n\n{text}",
        ),
        {
            "text": PARAGRAPHS,
            "form": words(
                "a bulleted list|a short dialogue|a poem of four lines|a tweet|a table with two columns|JSON "
                "with three keys"
                "|a letter to a friend|a radio announcement|a list of questions and answers"
            ),
        },
    ),
)
