"""The device code of kernel `triton`: a product of an MoE layer over grouped rows, and a token's sum.

Triton's interpreter runs the same code on CPU tensors, but it multiplies the bit patterns of bfloat16 and
truncates where a GPU rounds to nearest. There, inputs are widened to float32 and results rounded by hand.

A row is a token and one of its experts, a tile some rows of one expert (`launches.py`). Matrices lie in one
block of memory per expert (`packing.py`), so that experts load and unload singly: `table` has the address of
each expert's block, and `..._at` are offsets in bytes, the same in every block.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
from triton import language as tl

from expert_server.kernels.activation import ActivationKind
from expert_server.kernels.gpu.tiles import INNER, Coding

__all__ = ["INTERPRETED", "combine", "product"]

INTERPRETED = bool(triton.knobs.runtime.interpret)

# Device code reads such globals only.
_INTERPRETED = tl.constexpr(INTERPRETED)
_INNER = tl.constexpr(INNER)
_HALF = tl.constexpr(INNER // 2)
_FP8 = tl.constexpr(int(Coding.FP8))
_MXFP4 = tl.constexpr(int(Coding.MXFP4))
_SILU = tl.constexpr(int(ActivationKind.SILU))
_GELU = tl.constexpr(int(ActivationKind.GELU))
_GELU_TANH = tl.constexpr(int(ActivationKind.GELU_TANH))
_RELU = tl.constexpr(int(ActivationKind.RELU))
_RELU_SQUARED = tl.constexpr(int(ActivationKind.RELU_SQUARED))
_CLAMPED_SWIGLU = tl.constexpr(int(ActivationKind.CLAMPED_SWIGLU))


@triton.jit
def _narrow(values, dtype: tl.constexpr):
    """Round float32 to the nearest number of a dtype, ties to even."""
    if dtype == tl.bfloat16 and _INTERPRETED:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        # The sum turns some NaN into zeros.
        rounded = tl.where(values != values, bits, rounded)
        values = rounded.to(tl.uint32).to(tl.float32, bitcast=True)
    return values.to(dtype)


@triton.jit
def _dot(a, b, total):
    """Add a product to float32 sums: (M, K) by (K, N)."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _float(bits):
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _fp8_values(codes):
    """Decode e4m3 exactly: shifted into a float32, the exponent is 120 too small, also of subnormals.

    By hand, because sm_80 has no instruction for it.
    """
    codes = codes.to(tl.uint32)
    return _float(((codes & 0x80) << 24) | ((codes & 0x7F) << 20)) * 1.329227995784916e36


@triton.jit
def _e2m1_values(codes):
    """Decode e2m1 exactly: shifted into a float32, the exponent is 126 too small."""
    return _float(((codes & 8) << 28) | ((codes & 7) << 22)) * 8.507059173023462e37


@triton.jit
def _e8m0_values(exponents):
    """Decode powers of two; 2^-127 is a subnormal float32."""
    exponents = exponents.to(tl.uint32)
    return _float(tl.where(exponents == 0, 1 << 22, exponents << 23))


@triton.jit
def _add(
    total, x_ptrs, live, matrix_at, scales_at, channel, is_channel,
    channels, inner, at, groups_every, CODING: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Add inputs at to at + STEP of a product with some output channels of a matrix of so many channels.

    x_ptrs: (M, STEP) float inputs of the rows; of MXFP4 (M, STEP / 2), the first half. matrix_at, scales_at:
    addresses. channel: of the matrix.
    """
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    if CODING == _MXFP4:
        tl.static_assert(STEP == _INNER)
        codes_ptrs = tl.multiple_of((matrix_at + at // 2).to(tl.pointer_type(tl.uint8)), 16)
        half = tl.arange(0, _HALF)
        codes_ptrs += channel[None, :].to(tl.int64) * (inner // 2) + half[:, None]
        codes = tl.load(codes_ptrs, mask=is_channel[None, :], other=0).to(tl.uint32)
        scales_ptrs = scales_at.to(tl.pointer_type(tl.uint8)) + (at // _HALF * channels + channel)
        low_scale = tl.load(scales_ptrs, mask=is_channel, other=127)
        high_scale = tl.load(scales_ptrs + channels, mask=is_channel, other=127)
        low = _e2m1_values(codes & 15) * _e8m0_values(low_scale)[None, :]
        high = _e2m1_values(codes >> 4) * _e8m0_values(high_scale)[None, :]
        x_low = tl.load(x_ptrs + at, mask=live[:, None], other=0.0)
        x_high = tl.load(x_ptrs + (at + _HALF), mask=live[:, None], other=0.0)
        total = _dot(x_low, _narrow(low, dtype), total)
        return _dot(x_high, _narrow(high, dtype), total)
    else:
        x = tl.load(x_ptrs + at, mask=live[:, None], other=0.0)
        k = tl.arange(0, STEP)
        offsets = channel[None, :].to(tl.int64) * inner + (k[:, None] + at)
        if CODING == _FP8:
            codes_ptrs = tl.multiple_of(matrix_at.to(tl.pointer_type(tl.uint8)), 16)
            codes = tl.load(codes_ptrs + offsets, mask=is_channel[None, :], other=0)
            scales_ptrs = scales_at.to(tl.pointer_type(tl.float32))
            scales_ptrs += at // groups_every * channels + channel
            scales = tl.load(scales_ptrs, mask=is_channel, other=0.0)
            values = _narrow(_fp8_values(codes), dtype)
            part = _dot(x, values, tl.full(total.shape, 0.0, tl.float32))
            return total + part * scales[None, :]
        else:
            weights_ptrs = tl.multiple_of(matrix_at.to(tl.pointer_type(dtype)), 16)
            weights = tl.load(weights_ptrs + offsets, mask=is_channel[None, :], other=0.0)
            return _dot(x, weights, total)


@triton.jit
def _sigmoid(x):
    """No overflow for any x."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _activate(
    gate, up, KIND: tl.constexpr, HAS_GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """The formulas of `ActivationKind`; comparisons keep NaN, as minima and maxima would not."""
    if KIND == _CLAMPED_SWIGLU:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up) + 1.0
        out = gate * _sigmoid(ALPHA * gate)
    elif KIND == _SILU:
        out = gate * _sigmoid(gate)
    elif KIND == _GELU:
        out = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == _GELU_TANH:
        # (1 + tanh(z)) / 2 is sigmoid(2z).
        out = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif KIND == _RELU:
        out = tl.where(gate < 0, 0.0, gate)
    else:
        tl.static_assert(KIND == _RELU_SQUARED)
        out = tl.where(gate < 0, 0.0, gate)
        out = out * out
    if HAS_GATE:
        out = out * up
    return out


@triton.jit
def product(
    x, out, table, tile_expert, tile_start, tile_end, order, scores,
    outputs, inner, out_stride, top_k, matrix_at, scales_at, bias_at, groups_every,
    IS_UP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    CODING: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile's rows by some output channels of their expert's matrix.

    Up: out[row] = activation(matrix x[token]), gate and up in one pass; the matrix is (2I or I, inner), gate
    first. out: (N, out_stride); its padding becomes 0.
    Down: out[pair] = score[pair] * (matrix x[row]), rounded to out's dtype: bfloat16 if the tokens are. out:
    (T * top_k, outputs); rows of pairs without an expert stay as they are.
    x: (..., inner), its padding is 0. order: pair (token * top_k + k) of each row.
    """
    tile = tl.program_id(0)
    start = tl.load(tile_start + tile)
    end = tl.load(tile_end + tile)
    if start >= end:
        return
    block = tl.load(table + tl.load(tile_expert + tile))
    rows = start + tl.arange(0, ROWS)
    live = rows < end
    x_rows = rows
    if IS_UP:
        x_rows = tl.load(order + rows, mask=live, other=0) // top_k
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = columns < outputs
    WIDTH: tl.constexpr = STEP // 2 if CODING == _MXFP4 else STEP
    x_ptrs = x + x_rows[:, None].to(tl.int64) * inner + tl.arange(0, WIDTH)[None, :]
    channels = outputs
    if HAS_GATE:
        channels = 2 * outputs
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    up = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for at in range(0, inner, STEP):
        total = _add(
            total, x_ptrs, live, block + matrix_at, block + scales_at, columns, is_channel,
            channels, inner, at, groups_every, CODING, STEP,
        )  # fmt: skip
        if HAS_GATE:
            up = _add(
                up, x_ptrs, live, block + matrix_at, block + scales_at, columns + outputs,
                is_channel, channels, inner, at, groups_every, CODING, STEP,
            )  # fmt: skip
    if HAS_BIAS:
        bias_ptrs = (block + bias_at).to(tl.pointer_type(tl.float32)) + columns
        total += tl.load(bias_ptrs, mask=is_channel, other=0.0)[None, :]
        if HAS_GATE:
            up += tl.load(bias_ptrs + outputs, mask=is_channel, other=0.0)[None, :]
    out_rows = rows
    if IS_UP:
        total = _activate(total, up, KIND, HAS_GATE, ALPHA, LIMIT)
    else:
        out_rows = tl.load(order + rows, mask=live, other=0)
        total *= tl.load(scores + out_rows, mask=live, other=0.0)[:, None]
    out_ptrs = out + out_rows[:, None].to(tl.int64) * out_stride + columns[None, :]
    mask = live[:, None] & (columns < out_stride)[None, :]
    tl.store(out_ptrs, _narrow(total, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def combine(
    y, ids, out, tokens, hidden, top_k, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out[token] = sum of y over the token's pairs that have an expert, in float32 and in order of k."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token = token < tokens
    is_column = columns < hidden
    total = tl.full((TOKENS, COLUMNS), 0.0, tl.float32)
    for k in range(top_k):
        pair = token.to(tl.int64) * top_k + k
        has_expert = tl.load(ids + pair, mask=is_token, other=-1) >= 0
        y_ptrs = y + pair[:, None] * hidden + columns[None, :]
        mask = has_expert[:, None] & is_column[None, :]
        total += tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out + token[:, None].to(tl.int64) * hidden + columns[None, :]
    tl.store(out_ptrs, total, mask=is_token[:, None] & is_column[None, :])
