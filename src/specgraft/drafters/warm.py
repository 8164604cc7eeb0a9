"""Starting values taken from the target and from the answers' own statistics.

Sources: layer copies as in layer-dropped self-drafting; the Markov start is a truncated SVD of positive pointwise mutual
information of token pairs (Levy and Goldberg 2014).
Legend: D hidden size, V vocabulary, r Markov rank, P token pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from specgraft.drafters.drafter import Drafter


@torch.no_grad()
def copy_layers(drafter: Drafter, sources: Sequence[nn.Module], final_norm: nn.Module) -> None:
    """Draft layer i starts as `sources[i]`, a decoder layer of the target with the same shapes.

    The draft layers norm queries and keys and the target's may not: the norm weights start at the size that the target's
    own projections give on average. `hidden_norm` starts as the mean of the copied input norms, `norm` as the final norm.
    Raises ValueError where shapes differ.
    """
    assert len(sources) == drafter.config.layers
    for index, source in enumerate(sources):
        layer = drafter.get_submodule(f"layers.{index}")
        values = source.state_dict()
        wanted = layer.state_dict()
        for name, tensor in wanted.items():
            if name in values and values[name].shape != tensor.shape:
                raise ValueError(
                    f"drafters.warm_layers: layer {index} {name} is {tuple(values[name].shape)} in the target and "
                    f"{tuple(tensor.shape)} in the drafter; leave heads, head_dim and intermediate at 0, or set it to \"none\""
                )
            if name in values:
                tensor.copy_(values[name])
        for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
            if f"self_attn.{norm}.weight" not in values:
                size = _typical_size(values[f"self_attn.{projection}.weight"], values["input_layernorm.weight"])
                layer.get_parameter(f"self_attn.{norm}.weight").fill_(size)
    norms = torch.stack([source.state_dict()["input_layernorm.weight"].float() for source in sources])
    drafter.get_parameter("hidden_norm.weight").copy_(norms.mean(0))
    drafter.get_parameter("norm.weight").copy_(final_norm.state_dict()["weight"])


def _typical_size(projection: torch.Tensor, norm: torch.Tensor) -> float:
    """Root mean square of `projection @ x` for x with independent entries of the size that the norm leaves."""
    return float(((projection.float() * norm.float()) ** 2).sum(1).mean().sqrt())


@torch.no_grad()
def start_fc(drafter: Drafter, how: str) -> None:
    """`fc` starts as the mean of the taps ("mean") or as the deepest tap ("last"), plus its small random values."""
    size, count = drafter.config.hidden_size, len(drafter.config.taps)
    eye = torch.eye(size)
    for tap in range(count):
        share = 1 / count if how == "mean" else float(tap == count - 1)
        drafter.fc.weight[:, tap * size : (tap + 1) * size] += share * eye


@torch.no_grad()
def start_markov(drafter: Drafter, before: torch.Tensor, after: torch.Tensor, scale: float = 0.5) -> None:
    """W2 W1^T starts as a rank-r fit of the positive mutual information of token pairs.

    before, after [P]: neighbouring tokens of the answers. Entry (a, b) is max(0, log(n_ab n / (n_a n_b))), damped for rare
    pairs by n_ab / (n_ab + 1). Raises ValueError for a drafter without a Markov head.
    """
    head = drafter.markov_head
    if head is None:
        raise ValueError(f"drafters.warm_markov=true: this {drafter.config.kind} drafter has no Markov head; set it to false")
    vocab, rank = drafter.config.vocab_size, drafter.config.markov_rank
    pairs, counts = torch.unique(before * vocab + after, return_counts=True)
    left, right = pairs // vocab, pairs % vocab
    n = counts.float()
    n_left = torch.zeros(vocab).index_add_(0, left, n)
    n_right = torch.zeros(vocab).index_add_(0, right, n)
    value = (n.log() + n.sum().log() - n_left[left].log() - n_right[right].log()).clamp(min=0) * n / (n + 1)
    matrix = torch.sparse_coo_tensor(torch.stack([right, left]), value, (vocab, vocab), check_invariants=True).coalesce()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(matrix, q=min(rank, vocab), niter=4)
    root = (scale * s).sqrt()
    width = u.shape[1]
    head.markov_w2.weight[:, :width] = u * root
    head.markov_w1.weight[:, :width] = v * root
