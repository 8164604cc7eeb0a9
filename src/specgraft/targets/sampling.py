"""Sampling, for stages that may import targets but not ops."""

from specgraft.ops.sampling import Law, distribution, draw, uniforms

__all__ = ["Law", "distribution", "draw", "uniforms"]
