"""specgraft makes a frozen LLM decode faster: a drafter trained on the target's own tokens and hidden states."""

__version__ = "0.1.0"
