"""NumPy quantiser, written from the contract's section 5; knows nothing of jax_ep.

Payloads of 4-bit formats are uint8 with two codes per byte, the even element in the low
nibble. Scales of mx formats are float8_e8m0fnu.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
BLOCKS = {
    "fp8_block128": 128,
    "mxfp8": 32,
    "mxfp4": 32,
    "fp8_block128_e8m0": 128,
    "nvfp4": 16,
}
FOUR_BITS = ("mxfp4", "nvfp4")
TILED = ("mxfp8", "mxfp4", "nvfp4")  # formats whose scales may be in tiles
F32 = np.float32
NAN_BITS = 0x7FC00000


def codes_of(values: np.ndarray, dtype: np.dtype, largest: float) -> np.ndarray:
    """Rounds to nearest even, saturating; NaN is 0x7F in e4m3 and 0 in e2m1."""
    nan = np.isnan(values)
    clamped = np.where(nan, 0, np.clip(values, -largest, largest))
    codes = clamped.astype(dtype).view(np.uint8)
    return np.where(nan, 0x7F if dtype == E4M3 else 0, codes).astype(np.uint8)


def packed(codes: np.ndarray) -> np.ndarray:
    """Packs two 4-bit codes per byte."""
    return (codes[..., 0::2] & 0xF | (codes[..., 1::2] & 0xF) << 4).astype(np.uint8)


def unpacked(payload: np.ndarray) -> np.ndarray:
    """Unpacks to one 4-bit code per byte."""
    pairs = np.stack([payload & 0xF, payload >> 4], axis=-1)
    return pairs.reshape(*payload.shape[:-1], -1)


def _exponent(bits: np.ndarray, add: int, less: int) -> np.ndarray:
    return np.clip(((bits.astype(np.int64) + add) >> 23) - less, 0, 254)


def quantize(
    tokens: np.ndarray, name: str, input_scale: float = 1.0, floor: float = 1e-4
) -> tuple[np.ndarray, np.ndarray]:
    """Payload and scales of tokens `[..., H]`; `floor` is the least amax of a block."""
    x = np.asarray(tokens).astype(F32)
    blocks = x.reshape(*x.shape[:-1], -1, BLOCKS[name])
    bad = ~np.isfinite(blocks).all(axis=-1)
    blocks = np.where(bad[..., None], 0, blocks).astype(F32)
    amax = np.abs(blocks).max(axis=-1)
    with np.errstate(all="ignore"):
        if name == "fp8_block128":
            scales = np.maximum(amax, F32(floor)) / F32(448)
            codes = codes_of(blocks / scales[..., None], E4M3, 448)
            scales.view(np.uint32)[bad] = NAN_BITS
        elif name == "nvfp4":
            g = F32(input_scale)
            stored = codes_of(g * amax / F32(6), E4M3, 448)
            scales = stored.view(E4M3)
            value = scales.astype(F32)
            codes = codes_of(blocks * (g / value)[..., None], E2M1, 6)
            codes[value == 0] = 0
            stored[bad] = 0x7F
        else:
            bits = amax.view(np.uint32)
            rule = (0x200000, 2) if name == "mxfp4" else (0x1FFFFF, 8)
            byte = _exponent(bits, *rule)
            scaled = np.ldexp(blocks.astype(np.float64), 127 - byte[..., None])
            kind = (E2M1, 6) if name == "mxfp4" else (E4M3, 448)
            codes = codes_of(scaled, *kind)
            scales = np.where(bad, 0xFF, byte).astype(np.uint8).view(E8M0)
    eight_bits = name not in FOUR_BITS
    codes[bad] = 0x7F if eight_bits else 0
    codes = codes.reshape(x.shape)
    return (codes.view(E4M3) if eight_bits else packed(codes)), scales


def dequantize(
    payload: np.ndarray, scales: np.ndarray, name: str, input_scale: float = 1.0
) -> np.ndarray:
    """The float32 values of codes and scales; NaNs are one positive quiet NaN."""
    four_bits = name in FOUR_BITS
    codes = unpacked(payload).view(E2M1) if four_bits else payload
    values = codes.astype(F32)
    blocks = values.reshape(*values.shape[:-1], -1, BLOCKS[name])
    with np.errstate(all="ignore"):
        if name in ("mxfp8", "mxfp4", "fp8_block128_e8m0"):
            byte = scales.view(np.uint8)[..., None].astype(np.int64)
            result = np.ldexp(blocks.astype(np.float64), byte - 127).astype(F32)
            result[np.broadcast_to(byte == 0xFF, result.shape)] = np.nan
        else:
            result = blocks * scales.astype(F32)[..., None]
            if name == "nvfp4":
                result = result / F32(input_scale)
    result.view(np.uint32)[np.isnan(result)] = NAN_BITS
    return result.reshape(values.shape)


def tiled(
    scales: np.ndarray, row_offsets: np.ndarray, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """One-byte scales `[N, columns]` in layout "tiled_128x4", and `scales_offsets`."""
    rows, columns = scales.shape
    tiles = -(-(rows + 128 * groups) // 128)
    out = np.zeros((tiles, columns // 4, 32, 4, 4), np.uint8)
    offsets = np.zeros(groups, np.int32)
    used = 0
    for g in range(groups):
        start, size = int(row_offsets[g]), int(row_offsets[g + 1] - row_offsets[g])
        offsets[g] = used - start // 128
        for i in range(size):
            for c in range(columns):
                at = start // 128 + offsets[g] + i // 128
                out[at, c // 4, i % 32, (i % 128) // 32, c % 4] = scales.view(np.uint8)[
                    start + i, c
                ]
        used += -(-size // 128)
    return out.view(scales.dtype), offsets


def in_columns(scales: np.ndarray) -> np.ndarray:
    """Scales `[N, blocks]` in layout "columns": a line per block, padded to 4 rows."""
    padding = -len(scales) % 4
    return np.pad(scales, ((0, padding), (0, 0))).T
