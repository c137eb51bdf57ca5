"""Owns the sizes of k3-mini, as a config.json in the form Kimi K3 is published with.

It knows no value of any weight.
"""

from __future__ import annotations

from typing import Any

from firstlight.inputs.tiktoken_files import NUM_SPECIAL_SLOTS

NUM_LAYERS = 4
MLA_LAYERS = (4,)  # counted from 1
IMAGE_SIDE = 56
CONTEXT = 65536

_IGNORED = (
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
)


def model_config(base: int, *, quantised: bool) -> dict[str, Any]:
    """Returns the config of a vocabulary of `base` ranks and 256 slots; `quantised` says whether
    its expert matrices are MXFP4, as published, or dense, as they are trained.
    """
    ids = {"bos_token_id": base, "eos_token_id": base + 2, "pad_token_id": base + 255}
    text = {**_text(base + NUM_SPECIAL_SLOTS), **ids}
    if quantised:
        text["quantization_config"] = quantisation()
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        **ids,
        "dtype": "bfloat16",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": base + 21,
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": _vision(),
    }


def _text(vocab_size: int) -> dict[str, Any]:
    return {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": 2,
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 384,
        "kv_lora_rank": 128,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": list(MLA_LAYERS),
            "gate_lower_bound": -5.0,
            "head_dim": 32,
            "kda_layers": [n for n in range(1, NUM_LAYERS + 1) if n not in MLA_LAYERS],
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": CONTEXT,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 4,
        "num_expert_group": 1,
        "num_experts": 16,
        "num_experts_per_token": 2,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-5,
        "routed_expert_hidden_size": 64,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "v_head_dim": 64,
        "vocab_size": vocab_size,
    }


def _vision() -> dict[str, Any]:
    return {
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "init_pos_emb_height": 8,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 8,
        "linear_bias": False,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": 96,
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": False,
        "patch_size": 14,
        "pos_emb_interpolation_mode": "bilinear",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "qkv_hidden_size": 96,
        "text_hidden_size": 128,
        "vt_hidden_size": 96,
        "vt_intermediate_size": 256,
        "vt_num_attention_heads": 3,
        "vt_num_hidden_layers": 2,
    }


def quantisation() -> dict[str, Any]:
    """Returns how the published form says that expert matrices are MXFP4."""
    weights: dict[str, Any] = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
        "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8",
        "strategy": "group", "symmetric": True, "type": "float", "zp_dtype": None,
    }  # fmt: skip
    group = {
        "format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None,
        "targets": ["Linear"], "weights": weights,
    }  # fmt: skip
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": list(_IGNORED),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def preprocessor_config() -> dict[str, Any]:
    """Returns how pictures become patches: the published settings."""
    return {
        "media_proc_cfg": {
            "in_patch_limit": 4096,
            "patch_size": 14,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "merge_kernel_size": 2,
            "fixed_output_tokens": None,
            "patch_limit_on_one_side": 64,
            "in_patch_limit_each_frame": 4096,
            "in_patch_limit_video": 16384,
            "sample_fps": 8.0,
            "temporal_merge_kernel_size": 4,
            "timestamp_mode": "hh:mm:ss.fff",
            "transparent_bg_config": {
                "pattern": "chessboard",
                "chessboard_square_size": 8,
                "chessboard_square_on_top_left": True,
                "chessboard_white_value": 255,
                "chessboard_gray_value": 180,
            },
            "transparent_bg_fill_stage": "after_resize",
        }
    }
