"""Fresh renders of a run's prompts, for the gate that compares them with what is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specgraft.records import Prompt
from specgraft.regen.dialogue import turn_prompt
from specgraft.regen.recorded import recorded_rows
from specgraft.regen.render import Chat


class Renders:
    """Prompts by id, rendered anew at every call. KeyError for an id that is not there."""

    def __init__(self, chat: Chat, prompts: Mapping[str, Sequence[Prompt]]) -> None:
        self.chat = chat
        self.prompts = {prompt.id: prompt for part in prompts.values() for prompt in part}

    def __call__(self, prompt_id: str, answers: Sequence[Sequence[int]] = ()) -> list[int]:
        """Ids of the prompt of the turn behind these answers (ids)."""
        return turn_prompt(self.chat, self.prompts[prompt_id], answers)

    def recorded(self, prompt_id: str) -> list[tuple[list[int], list[bool]]]:
        """Ids and mask of every row of the recorded answers."""
        rows = recorded_rows(self.chat, self.prompts[prompt_id], "", 1 << 62, None)
        return [(row.input_ids, row.loss_mask) for row in rows]
