"""Attention of prompt chunks by cuDNN, for steps and layers that it covers.

torch carries cuDNN too, but its variable-length operator builds a plan, which takes tens of
milliseconds, in every call (pytorch/pytorch#191576), and its fixed-length one a plan for every
length of a prompt. So plans are made and kept here, through NVIDIA's `nvidia-cudnn-frontend`; sizes
are rounded up to powers of two, so that few are needed. Chunks lie one after another in q, and kv
heads are never expanded; keys and values are read from the step's own tensors (fresh chunks) or
from the paged cache. Must not know: models, plans of the scheduler. Entry point: `CudnnPrefill`.

T tokens, C chunks, H query heads, K kv heads, D head dim, N blocks, B block size, M table columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, auto
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo_worker.attention_inputs import AttentionOptions, StepInputs

# Shorter chunks gain nothing.
MIN_TOKENS = 512
_MAX_HEAD_DIM = 128


class _Uid(IntEnum):
    """Names of a graph's tensors."""

    Q = auto()
    K = auto()
    V = auto()
    OUT = auto()
    LENS_Q = auto()
    LENS_KV = auto()
    OFFSETS_Q = auto()
    OFFSETS_K = auto()
    OFFSETS_V = auto()
    OFFSETS_OUT = auto()
    TABLE_K = auto()
    TABLE_V = auto()


class _Key(NamedTuple):
    """What a plan is made for."""

    num_chunks: int
    max_q: int
    max_kv: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    row_strides: tuple[int, int, int]  # of q and, if fresh, k and v [T, heads, D]
    kv_shape: tuple[int, ...]  # [N, K, B, D] of a cache, or [K, D]


class _Plan(NamedTuple):
    graph: Any
    workspace: Tensor


@dataclass(frozen=True, slots=True)
class _Chunks:
    """A step's chunks in the form that cuDNN reads, the same for all layers."""

    num_chunks: int
    max_q: int
    max_kv: int
    tensors: Mapping[_Uid, Tensor]


def covers(q: Tensor, k_cache: Tensor, inputs: StepInputs, options: AttentionOptions) -> bool:
    """Whether a layer's attention in this step is among what cuDNN computes, and worth it."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and k_cache.dtype == q.dtype
        and options.window is None
        and options.soft_cap is None
        and options.kv_scales is None
        and q.shape[2] % 8 == 0
        and q.shape[2] <= _MAX_HEAD_DIM
        and inputs.max_seqlen_q >= MIN_TOKENS
    )


class CudnnPrefill:
    """One thread's plans on the current device."""

    def __init__(self) -> None:
        """Raises ImportError where the front end isn't installed."""
        self._cudnn: Any = import_module("cudnn")
        self._handle: Any = self._cudnn.create_handle()
        self._plans: dict[_Key, _Plan] = {}
        self._inputs: StepInputs | None = None
        self._chunks: dict[tuple[int, ...], _Chunks] = {}

    def attend_fresh(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs, options: AttentionOptions
    ) -> Tensor:
        """[T, H, D] of q [T, H, D]; k and v [T, K, D] are all that the chunks see."""
        strides = (q.stride(0), k.stride(0), v.stride(0))
        chunks = self._step_chunks(inputs, strides, q[0].numel(), 0)
        key = _key(q, tuple(k.shape[1:]), strides, chunks, options.scale)
        return self._run(key, chunks, q, k, v)

    def attend_paged(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: StepInputs,
        options: AttentionOptions,
    ) -> Tensor:
        """[T, H, D] of q [T, H, D], over the chunks' contexts in caches [N, K, B, D]."""
        strides = (q.stride(0), 0, 0)
        chunks = self._step_chunks(inputs, strides, q[0].numel(), k_cache.shape[2])
        key = _key(q, tuple(k_cache.shape), strides, chunks, options.scale)
        return self._run(key, chunks, q, k_cache, v_cache)

    def _run(self, key: _Key, chunks: _Chunks, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if key not in self._plans:
            self._plans[key] = self._build(key, q.device)
        plan = self._plans[key]
        stream = torch.cuda.current_stream(q.device).cuda_stream
        self._cudnn.set_stream(handle=self._handle, stream=stream)
        tensors = {_Uid.Q: q, _Uid.K: k, _Uid.V: v, _Uid.OUT: out, **chunks.tensors}
        pointers = {int(uid): tensor.data_ptr() for uid, tensor in tensors.items()}
        plan.graph.execute(pointers, plan.workspace, handle=self._handle)
        return out

    def _build(self, key: _Key, device: torch.device) -> _Plan:
        graph = describe(self._cudnn, key, self._handle)
        graph.build_operation_graph()
        graph.create_execution_plans([self._cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        size = max(graph.get_workspace_size(), 1)
        return _Plan(graph, torch.empty(size, dtype=torch.uint8, device=device))

    def _step_chunks(
        self,
        inputs: StepInputs,
        row_strides: tuple[int, int, int],
        out_stride: int,
        block_size: int,
    ) -> _Chunks:
        """Made once a step for all layers of like strides."""
        if inputs is not self._inputs:
            self._inputs, self._chunks = inputs, {}
        kind = (*row_strides, out_stride, block_size)
        if kind not in self._chunks:
            self._chunks[kind] = lay_out(inputs, row_strides, out_stride, block_size)
        return self._chunks[kind]


def lay_out(
    inputs: StepInputs, row_strides: tuple[int, int, int], out_stride: int, block_size: int
) -> _Chunks:
    """`block_size` 0: the chunks are fresh. Chunks that fill the batch up are empty."""
    num_chunks = inputs.prefill_context_lens.shape[0]
    padding = _next_power_of_2(num_chunks) - num_chunks
    borders = inputs.cu_seqlens_q
    borders = torch.cat([borders, borders[-1:].expand(padding)])
    max_q = _next_power_of_2(max(inputs.max_seqlen_q, MIN_TOKENS))
    tensors: dict[_Uid, Tensor] = {
        _Uid.LENS_Q: borders.diff(),
        _Uid.OFFSETS_Q: borders * row_strides[0],
        _Uid.OFFSETS_OUT: borders * out_stride,
    }
    if block_size == 0:
        tensors[_Uid.LENS_KV] = tensors[_Uid.LENS_Q]
        tensors[_Uid.OFFSETS_K] = borders * row_strides[1]
        tensors[_Uid.OFFSETS_V] = borders * row_strides[2]
        return _Chunks(num_chunks + padding, max_q, max_q, tensors)
    pad = torch.nn.functional.pad
    table = inputs.prefill_block_table
    num_columns = max(_next_power_of_2(table.shape[1]), MIN_TOKENS // block_size)
    table = pad(table, (0, num_columns - table.shape[1], 0, padding)).contiguous()
    tensors[_Uid.LENS_KV] = pad(inputs.prefill_context_lens, (0, padding))
    tensors[_Uid.TABLE_K] = tensors[_Uid.TABLE_V] = table
    return _Chunks(num_chunks + padding, max_q, num_columns * block_size, tensors)


def _key(
    q: Tensor,
    kv_shape: tuple[int, ...],
    row_strides: tuple[int, int, int],
    chunks: _Chunks,
    scale: float,
) -> _Key:
    sizes = (chunks.num_chunks, chunks.max_q, chunks.max_kv)
    return _Key(*sizes, q.shape[1], q.shape[2], q.dtype, scale, row_strides, kv_shape)


def describe(cudnn: Any, key: _Key, handle: Any = None) -> Any:
    """The computation as a graph of cuDNN's front end, validated, not yet built."""
    kind = cudnn.data_type
    dtype = kind.BFLOAT16 if key.dtype == torch.bfloat16 else kind.HALF
    graph = cudnn.pygraph(
        io_data_type=dtype,
        intermediate_data_type=kind.FLOAT,
        compute_data_type=kind.FLOAT,
        handle=handle,
    )

    def integers(uid: _Uid, num_rows: int, num_columns: int = 1) -> Any:
        """[rows, 1, columns, 1]"""
        return graph.tensor(
            uid=uid,
            name=uid.name,
            dim=[num_rows, 1, num_columns, 1],
            stride=[num_columns, num_columns, 1, 1],
            data_type=kind.INT32,
        )

    def rows(uid: _Uid, num_heads: int, max_len: int, row_stride: int, offsets: _Uid) -> Any:
        """[C, heads, tokens, D], where a chunk begins at its offset."""
        return graph.tensor(
            uid=uid,
            name=uid.name,
            dim=[key.num_chunks, num_heads, max_len, key.head_dim],
            stride=[max_len * row_stride, key.head_dim, row_stride, 1],
            data_type=dtype,
            ragged_offset=integers(offsets, key.num_chunks + 1),
        )

    q = rows(_Uid.Q, key.num_heads, key.max_q, key.row_strides[0], _Uid.OFFSETS_Q)
    tables: dict[str, Any] = {}
    if len(key.kv_shape) == 2:
        kv_heads = key.kv_shape[0]
        k = rows(_Uid.K, kv_heads, key.max_kv, key.row_strides[1], _Uid.OFFSETS_K)
        v = rows(_Uid.V, kv_heads, key.max_kv, key.row_strides[2], _Uid.OFFSETS_V)
    else:
        _, kv_heads, block_size, head_dim = key.kv_shape
        block = block_size * head_dim
        strides = [kv_heads * block, block, head_dim, 1]
        k, v = (
            graph.tensor(
                uid=uid, name=uid.name, dim=list(key.kv_shape), stride=strides, data_type=dtype
            )
            for uid in (_Uid.K, _Uid.V)
        )
        size = (key.num_chunks, key.max_kv // block_size)
        tables = {
            "paged_attention_k_table": integers(_Uid.TABLE_K, *size),
            "paged_attention_v_table": integers(_Uid.TABLE_V, *size),
            "paged_attention_max_seq_len_kv": key.max_kv,
        }
    out, _ = graph.sdpa(
        name="prefill",
        q=q,
        k=k,
        v=v,
        attn_scale=key.scale,
        generate_stats=False,
        use_padding_mask=True,
        seq_len_q=integers(_Uid.LENS_Q, key.num_chunks),
        seq_len_kv=integers(_Uid.LENS_KV, key.num_chunks),
        # A chunk is the end of its context.
        diagonal_alignment=(
            cudnn.diagonal_alignment.BOTTOM_RIGHT if tables else cudnn.diagonal_alignment.TOP_LEFT
        ),
        diagonal_band_right_bound=0,
        **tables,
    )
    dense = key.num_heads * key.head_dim
    out.set_output(True).set_uid(_Uid.OUT).set_data_type(dtype)
    out.set_dim([key.num_chunks, key.num_heads, key.max_q, key.head_dim])
    out.set_stride([key.max_q * dense, key.head_dim, dense, 1])
    out.set_ragged_offset(integers(_Uid.OFFSETS_OUT, key.num_chunks + 1))
    graph.validate()
    return graph


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
