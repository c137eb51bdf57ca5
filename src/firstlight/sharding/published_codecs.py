"""Owns what a config may say of quantised weights that are dequantised when read; reads no tensor.

Three writers are known: `fp8` (E4M3 codes, a scale a tensor or a block) and `compressed-tensors`
(int8, int4, fp8, mxfp4; symmetric). Anything else is refused by name, never guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.errors import ConfigError

FIELD = "quantization_config"


@dataclass(frozen=True)
class PublishedCodec:
    """How the quantised matrices of a checkpoint are written.

    `codec` names what a code means (int8, int4, fp8, mxfp4). Codes are in NAME + `codes`, scales in
    one of NAME + `scales`. `block` is rows and columns that share a scale, None where the shape of
    the scales says it. `excess`: int8 codes are stored plus 128.
    """

    codec: str
    codes: str
    scales: tuple[str, ...]
    block: tuple[int, int] | None = None
    excess: bool = False


_WEIGHT, _PACKED = ".weight", ".weight_packed"
_SCALES = (".weight_scale", ".weight_scale_inv")


def published_codec(config: Mapping[str, Any]) -> PublishedCodec | None:
    """Returns how a checkpoint's matrices are quantised, None when the config says nothing of it.

    Raises ConfigError naming the field when they are quantised in a way that is not read.
    """
    fields = config.get(FIELD)
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise ConfigError(f"config.json: {FIELD} must be an object")
    method = fields.get("quant_method")
    if method == "fp8":
        return PublishedCodec("fp8", _WEIGHT, _SCALES, _block(fields))
    if method == "compressed-tensors":
        return _compressed(fields)
    raise _refused("quant_method", method, "fp8 or compressed-tensors")


def _block(fields: Mapping[str, Any]) -> tuple[int, int] | None:
    size = fields.get("weight_block_size")
    if size is None:
        return None
    if (
        not isinstance(size, list)
        or len(size) != 2
        or any(type(n) is not int or n < 1 for n in size)
    ):
        raise _refused("weight_block_size", size, "two positive numbers")
    return size[0], size[1]


def _compressed(fields: Mapping[str, Any]) -> PublishedCodec:
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refused("config_groups", groups, "at least one group")
    kinds = {_weights_of(group, fields.get("format")) for group in groups.values()}
    if len(kinds) != 1:
        raise _refused("config_groups", sorted(map(str, kinds)), "groups that are alike")
    return kinds.pop()


def _weights_of(group: object, format_of_all: object) -> PublishedCodec:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        raise _refused("config_groups", group, "weights")
    if weights.get("symmetric", True) is not True:
        raise _refused("symmetric", weights.get("symmetric"), "true: zero points are not read")
    if weights.get("actorder") not in (None, "static", "weight"):
        raise _refused("actorder", weights.get("actorder"), "columns in their order")
    kind = (weights.get("type"), weights.get("num_bits"))
    form = group.get("format") or format_of_all
    known = _FORMS.get((*kind, form))
    if known is None:
        what = f"{form} with {kind[1]}-bit {kind[0]}"
        raise _refused(
            "config_groups", what, "int8, int4, fp8 or mxfp4 as compressed-tensors has it"
        )
    size = weights.get("block_structure")
    block = _block({"weight_block_size": size}) if size is not None else None
    return PublishedCodec(**{**vars(known), "block": block})


_FORMS: Mapping[tuple[Any, Any, Any], PublishedCodec] = {
    **{
        ("float", 8, form): PublishedCodec("fp8", _WEIGHT, _SCALES)
        for form in ("float-quantized", "naive-quantized")
    },
    **{
        ("int", 8, form): PublishedCodec("int8", _WEIGHT, _SCALES)
        for form in ("int-quantized", "naive-quantized")
    },
    ("int", 8, "pack-quantized"): PublishedCodec("int8", _PACKED, _SCALES, excess=True),
    ("int", 4, "pack-quantized"): PublishedCodec("int4", _PACKED, _SCALES),
    ("float", 4, "mxfp4-pack-quantized"): PublishedCodec("mxfp4", _PACKED, _SCALES),
}


def _refused(field: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(
        f"config.json: {FIELD}, {field} {value!r} is not read (wanted: {wanted}). Use the "
        "unquantised checkpoint, or quantise it with `firstlight shard --dtype`"
    )
