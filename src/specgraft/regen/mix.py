"""Which prompts a run answers, by split."""

from __future__ import annotations

from specgraft.config import RunConfig
from specgraft.records import Prompt
from specgraft.regen.prompts import builtin_prompts, read_prompts, split_of
from specgraft.run_dir import RunDir


def chosen_prompts(config: RunConfig, run: RunDir | None = None) -> dict[str, list[Prompt]]:
    """The prompts of each split. Raises ValueError when the source holds too few."""
    part = config.prompts
    chosen: dict[str, list[Prompt]] = {}
    for split, key, wanted in (("train", "train", part.train), ("heldout", "held_out", part.held_out)):

        def keep(family: str, split: str = split) -> bool:
            return split_of(family, part.held_out_share) == split

        try:
            if part.source == "builtin":
                mine = builtin_prompts(
                    wanted, seed=config.run.seed, languages=part.languages, domains=part.domains, keep=keep
                )
            else:
                mine = [prompt for prompt in read_prompts(part.source) if keep(prompt.family)]
        except ValueError as error:
            raise ValueError(f"prompts.{key}={wanted}: {error}") from None
        if len(mine) < wanted:
            raise ValueError(
                f"prompts.{key}={wanted}, but {part.source} has {len(mine)} {split} prompts at "
                f"held_out_share={part.held_out_share}: lower the number or change the share"
            )
        chosen[split] = mine[:wanted]
    return chosen
