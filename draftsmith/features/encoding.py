"""Features as files hold them: rounded to the store's dtype, or to 8 bits with a scale per token and layer.

The 8-bit form is float8_e4m3 (4 bits of exponent, 3 of mantissa, largest value 448) times a power of two, chosen for
every token and tapped layer (and for the final state) as the smallest with which the largest value fits. A power of two
costs nothing against any other scale, since the error of a floating-point value does not depend on it, and makes
decoding exact: a decoded value is a bfloat16 without further rounding, and encoding it again gives the same value.

Error: |decoded - x| <= max(|x| / 16, m / 2^17), m the largest |x| of that token and layer.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from draftsmith.features.schema import EXPONENT, FP8, CaptureLayout

# The largest value of float8_e4m3, also as 0.875 * 2^9.
_LARGEST = 448.0
_LARGEST_MANTISSA = 0.875
_LARGEST_EXPONENT = 9
# Within these, scaled and decoded values are normal numbers of bfloat16. Rows beyond the upper end become NaN, and are
# refused as such; the lower end is 10^-33.
_LEAST, _MOST = -110, 119

_FINITE = 0x7F  # all bits but the sign: NaN, and the only value that is not finite


def encode(features: Mapping[str, Tensor], layout: CaptureLayout) -> dict[str, Tensor]:
    """Features [N, width] of any float dtype -> the tensors of `layout.stored`, on the same device.

    Values that the store's dtype cannot hold become NaN or Inf; `finite_rows` finds them.
    """
    if layout.dtype != FP8:
        return {name: features[name].to(layout.dtype) for name in layout.widths}
    stored: dict[str, Tensor] = {}
    for name in layout.widths:
        stored[name], stored[name + EXPONENT] = _to_8_bits(features[name], layout.hidden_size)
    return stored


def decode(stored: Mapping[str, Tensor], layout: CaptureLayout, names: Iterable[str]) -> dict[str, Tensor]:
    """The features `names` [N, width] in `layout.feature_dtype`, of what `encode` made."""
    if layout.dtype != FP8:
        return {name: stored[name] for name in names}
    return {name: _from_8_bits(stored[name], stored[name + EXPONENT], layout.hidden_size) for name in names}


def finite_rows(stored: Mapping[str, Tensor]) -> Tensor:
    """Of which rows every stored value is finite: bool [N]."""
    return torch.stack([_finite(tensor).all(dim=-1) for tensor in stored.values()]).all(dim=0)


def _finite(tensor: Tensor) -> Tensor:
    if tensor.dtype == FP8:
        return (tensor.view(torch.uint8) & _FINITE) != _FINITE
    return tensor.isfinite()


def _to_8_bits(feature: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """[N, T*H] -> (float8_e4m3 [N, T*H], exponents int8 [N, T])."""
    if feature.dtype == torch.float16:  # whose range does not hold the scales
        feature = feature.float()
    by_layer = feature.unflatten(-1, (-1, hidden_size))  # [N, T, H]
    low, high = by_layer.aminmax(dim=-1)
    largest = torch.maximum(-low, high).float()  # [N, T]; NaN where any value is
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - _LARGEST_EXPONENT + (mantissa > _LARGEST_MANTISSA).to(exponent.dtype)
    # A row of zeros has no exponent; one of NaN any: its values tell.
    exponent = torch.where(largest > 0, exponent, _LEAST).clamp(_LEAST, _MOST)
    scale = _power_of_two(-exponent)
    scale = torch.where(largest * scale <= _LARGEST, scale, torch.nan)
    values = (by_layer * scale.to(feature.dtype)[..., None]).to(FP8)
    return values.flatten(-2), exponent.to(torch.int8)


def _from_8_bits(values: Tensor, exponents: Tensor, hidden_size: int) -> Tensor:
    """The inverse, in bfloat16: exact, since 8-bit values and powers of two both are."""
    scale = _power_of_two(exponents).to(torch.bfloat16)  # [N, T]
    by_layer = values.to(torch.bfloat16).unflatten(-1, (-1, hidden_size))
    return (by_layer * scale[..., None]).flatten(-2)


def _power_of_two(exponents: Tensor) -> Tensor:
    """2 to these integers between -126 and 127, as float32 and exact on every device: the bits of the number."""
    return ((exponents.int() + 127) << 23).view(torch.float32)
