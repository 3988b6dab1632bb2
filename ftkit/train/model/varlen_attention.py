"""Attention within packed documents, given their offsets: flash-attn-4, or cuDNN through its Python frontend."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from ftkit.train.private_apis.libraries import flash_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.train.private_apis.torch import Ctx

VARLEN = {"flash4": "ftkit_varlen", "cudnn": "ftkit_cudnn"}
"""Names in transformers of the kernels that take `cu_seqlens`. transformers treats names with "flash" specially."""

_MIN_DOCUMENTS = 64
"""Documents of the smallest graph. Empty documents cost nothing measurable (H100, cuDNN 9.19: 2 documents of 4,096
tokens take 2.28 ms in a graph for 2, and 2.31 ms in one for 64), but each further graph takes 0.2 s to build."""


# The compiler doesn't trace into custom operators, and activation checkpointing can save their outputs. flash-attn-4's
# public function allows neither, so these operators call its private functions.
@torch.library.custom_op("ftkit::varlen_attention", mutates_args=())
def varlen_attention(  # noqa: PLR0913, PLR0917 - operators take only tensors and numbers
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    sliding_window: int | None,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, [B * T, H, D], and the log-sum-exp of the scores, fp32 [H, B * T]; [B * T, H] with cuDNN."""
    if kernel == "cudnn":
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        _run_cudnn([query, key, value, output, lse], cu_seqlens, scale, sliding_window, is_backward=False)
        return output, lse
    flash_forward, _ = flash_attention()
    options = _options(cu_seqlens, max_seqlen, scale, sliding_window)
    output, lse, *_ = flash_forward(query, key, value, return_lse=True, **options)
    return output, lse


@torch.library.custom_op(
    "ftkit::varlen_attention_backward",
    mutates_args=(),
    # An explicit schema, since torch 2.6 does not support list[Tensor].
    schema="(Tensor gradient, Tensor[] saved, Tensor cu_seqlens, int max_seqlen, float scale, int? sliding_window,"
    " str kernel) -> (Tensor, Tensor, Tensor)",
)
def _varlen_backward(  # noqa: PLR0913, PLR0917 - operators take only tensors and numbers
    gradient: torch.Tensor,
    saved: list[torch.Tensor],
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    sliding_window: int | None,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value; `saved` has these three, the output, and `lse`.

    Both kernels sum parts of a query's gradient in the order in which they are ready, unless results must repeat.
    """
    query, key, value, output, lse = saved
    if kernel == "cudnn":
        of_query, of_key, of_value = (
            torch.empty_like(each, memory_format=torch.contiguous_format) for each in (query, key, value)
        )
        tensors = [query, key, value, output, gradient, lse, of_query, of_key, of_value]
        _run_cudnn(tensors, cu_seqlens, scale, sliding_window, is_backward=True)
        return of_query, of_key, of_value
    _, flash_backward = flash_attention()
    options = _options(cu_seqlens, max_seqlen, scale, sliding_window)
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True
    of_query, of_key, of_value, *_ = flash_backward(query, key, value, output, gradient, lse, **options)
    return of_query.contiguous(), of_key.contiguous(), of_value.contiguous()


def _options(cu_seqlens: torch.Tensor, max_seqlen: int, scale: float, sliding_window: int | None) -> dict[str, object]:
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": None if sliding_window is None else sliding_window - 1,
        "window_size_right": None if sliding_window is None else 0,
    }


@varlen_attention.register_fake
def _(query: torch.Tensor, _: torch.Tensor, value: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    length, heads, _width = query.shape
    shape = (length, heads) if rest[-1] == "cudnn" else (heads, length)
    return query.new_empty(length, heads, value.shape[-1]), query.new_empty(shape, dtype=torch.float32)


@_varlen_backward.register_fake
def _(_: torch.Tensor, saved: list[torch.Tensor], *__: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_query, of_key, of_value = (tensor.new_empty(tensor.shape) for tensor in saved[:3])
    return of_query, of_key, of_value


def _save_for_backward(ctx: Ctx, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens)


def _backward(ctx: Ctx, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *saved, cu_seqlens = ctx.saved_tensors
    return (*_varlen_backward(gradient, saved, cu_seqlens, *ctx.settings), None, None, None, None, None)


varlen_attention.register_autograd(_backward, setup_context=_save_for_backward)


class _Sizes(NamedTuple):
    """The sizes that a graph is built for."""

    documents: int  # maximum; the rest have no tokens
    tokens: int
    heads: int
    key_heads: int
    width: int  # of a head's queries and keys
    value_width: int
    scale: float
    window: int | None


def _run_cudnn(
    tensors: list[torch.Tensor], cu_seqlens: torch.Tensor, scale: float, window: int | None, *, is_backward: bool
) -> None:
    """Launch a graph, which writes to the outputs among the tensors: they must be contiguous.

    Forward: query [T, H, D], key [T, K, D], value [T, K, Dv], then the output [T, H, Dv] and the log-sum-exp of the
    scores, fp32 [T, H]. Backward: query, key, value, output, its gradient, the log-sum-exp; then the gradients of
    query, key and value. `cu_seqlens` is int32 [N + 1] for N documents.
    """
    query, key, value = tensors[:3]
    (tokens, heads, width), key_heads, value_width = query.shape, key.shape[1], value.shape[-1]
    documents = max(_MIN_DOCUMENTS, 1 << (len(cu_seqlens) - 2).bit_length())
    sizes = _Sizes(documents, tokens, heads, key_heads, width, value_width, scale, window)
    device = cu_seqlens.device
    graph, described, num_bytes = _graph(sizes, device.index, is_backward=is_backward)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    # Elements of a token in queries, keys, values, outputs and log-sum-exps.
    row_sizes = (heads * width, key_heads * width, key_heads * value_width, heads * value_width, heads)
    boundaries = _boundaries(cu_seqlens, documents, tokens, row_sizes)
    arguments = [*(tensor.contiguous() for tensor in tensors), *boundaries]
    handle = _handle(device.index)
    _cudnn().set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    graph.execute(dict(zip(described, arguments, strict=True)), workspace, handle=handle)


@lru_cache(maxsize=1)  # all layers of a micro-batch pass the same tensor, and tensors compare by identity as keys
def _boundaries(
    cu_seqlens: torch.Tensor, documents: int, tokens: int, row_sizes: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """Return the offsets of documents in tensors with rows of these sizes, int64, then their lengths, int32."""
    ends = functional.pad(cu_seqlens.long(), (0, documents + 1 - len(cu_seqlens)), value=tokens)
    return (*(ends * size for size in row_sizes), ends.diff().int())


@cache
def _graph(sizes: _Sizes, device: int, *, is_backward: bool) -> tuple[Any, Sequence[Any], int]:
    """Return a graph of cuDNN for all packs, its tensors in the order of the arguments, and its workspace in bytes."""
    cudnn = _cudnn()  # offsets of documents are arguments, so that one graph serves all packs
    bf16, fp32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=bf16, intermediate_data_type=fp32, compute_data_type=fp32, handle=_handle(device)
    )

    def of_documents(name: str, num: int, dtype: Any) -> Any:
        return graph.tensor(name=name, dim=[num, 1, 1, 1], stride=[1, 1, 1, 1], data_type=dtype)

    names = ("query", "key", "value", "output", "lse")
    offsets = {name: of_documents(f"offsets of {name}", sizes.documents + 1, cudnn.data_type.INT64) for name in names}
    lengths = of_documents("lengths", sizes.documents, cudnn.data_type.INT32)
    key_heads, width, value_width = sizes.key_heads, sizes.width, sizes.value_width
    layouts = {
        "query": (sizes.heads, width, bf16),
        "key": (key_heads, width, bf16),
        "value": (key_heads, value_width, bf16),
        "output": (sizes.heads, value_width, bf16),
        "lse": (sizes.heads, 1, fp32),
    }

    def packed(like: str, output: Any = None) -> Any:
        """Describe a tensor [T, heads, width] as [documents, heads, tokens, width] with ragged documents."""
        heads, size, dtype = layouts[like]
        dim = [sizes.documents, heads, sizes.tokens, size]
        stride = [sizes.tokens * heads * size, size, heads * size, 1]
        if output is None:
            output = graph.tensor(name=like, dim=dim, stride=stride, data_type=dtype)
        else:
            output.set_output(True).set_dim(dim).set_stride(stride).set_data_type(dtype)
        output.set_ragged_offset(offsets[like])
        return output

    options: dict[str, Any] = {
        "attn_scale": sizes.scale,
        "use_padding_mask": True,
        "seq_len_q": lengths,
        "seq_len_kv": lengths,
        "use_causal_mask": True,
        "sliding_window_length": sizes.window,
    }
    query, key, value = (packed(name) for name in names[:3])
    if is_backward:
        output, gradient, lse = packed("output"), packed("output"), packed("lse")
        options |= {"max_total_seq_len_q": sizes.tokens, "max_total_seq_len_kv": sizes.tokens}
        found = graph.sdpa_backward(q=query, k=key, v=value, o=output, dO=gradient, stats=lse, **options)
        results = [packed(name, each) for name, each in zip(names[:3], found, strict=True)]
        tensors = [query, key, value, output, gradient, lse, *results]
    else:
        found = graph.sdpa(q=query, k=key, v=value, is_inference=False, **options)
        tensors = [query, key, value, *(packed(name, each) for name, each in zip(names[3:], found, strict=True))]
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph, [*tensors, *offsets.values(), lengths], max(graph.get_workspace_size(), 1)


@cache
def _handle(device: int) -> Any:
    with torch.cuda.device(device):
        return _cudnn().create_handle()


def _cudnn() -> Any:
    import cudnn  # type: ignore[import-not-found] # noqa: PLC0415 - on GPUs

    return cudnn
