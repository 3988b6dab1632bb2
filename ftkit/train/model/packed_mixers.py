"""The gated delta rule (Yang et al. 2024) and short convolutions on packed documents, in PyTorch.

Each token decays the state of a head, [K, V], and writes the token's value for its key. Within a chunk, matmuls compute
all tokens at once (the UT transform of that paper). From chunk to chunk, the state changes linearly, S' = A S + B.
Therefore groups of chunks are composed in parallel, and only the groups are sequential: about 2 sqrt(n) steps for n
chunks instead of n.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

CHUNK = 64


def chunk_gated_delta_rule(  # noqa: PLR0913, PLR0917 - the interface is transformers'
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,  # noqa: FBT001, FBT002
    cu_seqlens: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return the outputs, [B, T, H, V], in the dtype of the query; computed in fp32.

    Query and key are [B, T, G, K], and each of their heads serves H / G value heads. Value is [B, T, H, V]. beta, and
    g, the log decay, are [B, T, H]. `cu_seqlens`, int [D + 1], has offsets of documents if B is 1; without it, each row
    is a document.
    """
    length, heads = value.shape[1:3]
    shared = heads // key.shape[2]
    q, k, v, decay, rate = (one.float().movedim(2, 1) for one in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (q, k))
    q, k = ((one if shared == 1 else one.repeat_interleave(shared, dim=1)) for one in (q, k))
    q = q * k.shape[-1] ** -0.5

    places = torch.arange(length, device=value.device)
    document = torch.zeros_like(places) if cu_seqlens is None else torch.bucketize(places, cu_seqlens, right=True)
    padding = -length % CHUNK
    # N chunks of C tokens: [B, H, N, C, K], of values [B, H, N, C, V], and [B, H, N, C]; `document` is [N, C].
    q, k, v = (_divided(functional.pad(one, (0, 0, 0, padding)), CHUNK) for one in (q, k, v))
    decay, rate = (_divided(functional.pad(one, (0, padding)), CHUNK) for one in (decay, rate))
    document = functional.pad(document, (0, padding), value=-1).view(-1, CHUNK)

    last = document[:, -1]
    before = functional.pad(last[:-1], (1, 0), value=-2)
    continues = (document == before[:, None]).unsqueeze(-1)  # tokens of the document in which the chunk before ended
    remains = (document == last[:, None]).unsqueeze(-1)  # tokens of the document in which the chunk ends

    is_visible = (document[:, :, None] == document[:, None]).tril()
    # Sum the decays between two tokens term by term: the difference of two prefix sums, and its gradients, would lose
    # digits to cancellation.
    between = decay[..., None].expand(*decay.shape, decay.shape[-1]).tril(-1).cumsum(-2)
    weights = between.masked_fill(~is_visible, -math.inf).exp()
    total = decay.cumsum(-1)
    since_begin = total.exp().unsqueeze(-1) * continues
    until_end = between[..., -1, :].exp().unsqueeze(-1) * remains

    rate = rate[..., None]
    learned = rate * k
    system = (learned @ k.mT) * weights
    right = torch.cat([rate * v, learned * since_begin], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    kept = (k * until_end).mT
    passes = total[..., -1].exp()[..., None, None] * (last == before)[:, None, None]
    transition = passes * torch.eye(k.shape[-1], device=k.device) - kept @ read
    states = _states_before(transition, kept @ new)
    output = (q * since_begin) @ states + ((q @ k.mT) * weights) @ (new - read @ states)
    return output.flatten(2, 3)[:, :, :length].movedim(1, 2).to(query.dtype), None


def _divided(values: torch.Tensor, size: int) -> torch.Tensor:
    """Divide the third dimension into parts of a size: [B, H, T, …] to [B, H, T / size, size, …]."""
    return values.reshape(*values.shape[:2], -1, size, *values.shape[3:])


def _states_before(transition: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Return the state before each chunk, [B, H, N, K, V], where S' = transition S + added.

    Compose chunk j of each group with the chunks before it in the group, for all groups at once.
    """
    count = transition.shape[2]
    size = math.isqrt(count - 1) + 1
    padded = (functional.pad(one, (0, 0, 0, 0, 0, -count % size)) for one in (transition, added))
    steps = zip(*(_divided(one, size).unbind(3) for one in padded), strict=True)
    composed = [next(steps)]
    for step, add in steps:
        product, total = composed[-1]
        composed.append((step @ product, step @ total + add))

    group_product, group_total = composed[-1]
    state = torch.zeros_like(added[:, :, 0])
    at_begin = []
    for product, total in zip(group_product.unbind(2), group_total.unbind(2), strict=True):
        at_begin.append(state)
        state = product @ state + total
    begin = torch.stack(at_begin, dim=2)
    inside = [product @ begin + total for product, total in composed[:-1]]
    return torch.stack([begin, *inside], dim=3).flatten(2, 3)[:, :, :count]


def convolve_documents(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    """Convolve each channel of [B, D, T] over the last K tokens of the same document.

    Compilers fuse the K products. Weight: [D, K]; `seq_idx`: [B, T], the document of each token.
    """
    width = weight.shape[-1]
    inputs = hidden_states.to(weight.dtype)
    total = inputs * weight[:, -1, None]
    for distance in range(1, width):
        shifted = functional.pad(inputs, (distance, 0))[..., : inputs.shape[-1]]
        before = functional.pad(seq_idx, (distance, 0), value=-1)[..., : inputs.shape[-1]]
        total = total + torch.where((before == seq_idx)[:, None], shifted, 0) * weight[:, -1 - distance, None]
    if bias is not None:
        total = total + bias[:, None]
    if activation is not None:
        total = ACT2FN[activation](total)
    return total.to(hidden_states.dtype)
