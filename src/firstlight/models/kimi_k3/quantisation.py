"""Owns what a Kimi config may say of quantised weights; everything but MXFP4 experts is refused."""

from firstlight.models.config_reader import ConfigReader

_FORMAT = "mxfp4-pack-quantized"


def is_quantised(reader: ConfigReader) -> bool:
    """Says whether expert matrices are MXFP4: 4-bit floats, an 8-bit exponent for every 32 inputs.

    Raises ConfigError naming the field when they are quantised in any other way.
    """
    if not reader.has("quantization_config"):
        reader.ignore(("quantization_config",))
        return False
    method = reader.section("quantization_config")
    method.must_equal("quant_method", ("compressed-tensors",), None)
    method.must_equal("format", (_FORMAT,), None)
    method.must_equal("quantization_status", ("compressed",), "compressed")
    method.must_equal("kv_cache_scheme", (None,), None)
    # What is quantised is known tensor by tensor: the rule table says it, the headers prove it.
    method.ignore(("ignore", "global_compression_ratio", "version"))
    groups = method.section("config_groups")
    _read_group(groups.section("group_0"))
    groups.finish()
    method.finish()
    return True


def _read_group(group: ConfigReader) -> None:
    group.must_equal("format", (_FORMAT,), _FORMAT)
    group.must_equal("input_activations", (None,), None)
    group.must_equal("output_activations", (None,), None)
    group.must_equal("targets", (["Linear"],), ["Linear"])
    weights = group.section("weights")
    weights.must_equal("num_bits", (4,), None)
    weights.must_equal("type", ("float",), None)
    weights.must_equal("group_size", (32,), None)
    weights.must_equal("strategy", ("group",), None)
    weights.must_equal("symmetric", (True,), None)
    weights.must_equal("dynamic", (False,), False)
    weights.must_equal("scale_dtype", ("torch.uint8",), "torch.uint8")
    weights.must_equal("zp_dtype", (None,), None)
    weights.must_equal("actorder", (None,), None)
    weights.must_equal("block_structure", (None,), None)
    weights.ignore(("observer", "observer_kwargs"))  # how scales were found, not what they are
    weights.finish()
    group.finish()
