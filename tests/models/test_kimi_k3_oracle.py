"""Kimi K3 against what its reference implementation computes, on the miniature checkpoint.

Limits are those the oracle states from measured spreads (tests/data/k3/cases/README.md).
"""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.layers.packed_batch import pack_whole
from firstlight.models.spec import read_model_spec
from k3_oracle import (
    CHECKPOINT,
    IMAGE_CASES,
    PAGE,
    TEXT_CASES,
    cached_batch,
    grid_of,
    load_case,
    load_model,
    make_states,
    pixels_of,
    whole_batch,
)

LOGITS, RESIDUAL, FEATURES, STATES, WEIGHTS = 2e-3, 3e-4, 1e-4, 2e-4, 1e-4
CASES = (*TEXT_CASES, *IMAGE_CASES)


@cache
def model(kernels="reference"):
    fast = builtin_kernels().resolve(machine_query())
    return load_model(kernels=reference_kernels() if kernels == "reference" else fast)


def furthest(found, wanted):
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max())


def spy(modules):
    """Records the outputs of modules by name until the handles are removed."""
    seen: dict[str, Tensor] = {}

    def recorder(name):
        def record(_module, _args, output):
            seen[name] = output

        return record

    return seen, [m.register_forward_hook(recorder(name)) for name, m in modules.items()]


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_logits(name, kernels):
    case, module = load_case(name), model(kernels)
    logits = module.head(module(case.ids_T, whole_batch(case, module)))
    assert furthest(logits, case.tensors["logits"]) <= LOGITS


@torch.inference_mode()
def test_a_ragged_batch_is_each_sequence_alone():
    case, module = load_case("batch_ragged"), model()
    sequences = range(len(case.facts["sequences"]))
    ids = [case.tensors[f"seq.{k}.input_ids"].long() for k in sequences]
    batch = pack_whole([len(i) for i in ids])
    logits = module.head(module(torch.cat(ids), batch))
    wanted = torch.cat([case.tensors[f"seq.{k}.logits"] for k in sequences])
    assert furthest(logits, wanted) <= LOGITS


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_router_choices(name):
    case, module = load_case(name), model()
    layers = {n: m for n, m in module.named_modules() if n.endswith("moe.routed.router")}
    seen, handles = spy(layers)
    module(case.ids_T, whole_batch(case, module))
    for handle in handles:
        handle.remove()
    assert len(seen) == 8
    for where, (ids_TK, weights_TK) in seen.items():
        layer = where.split(".")[1]
        order = ids_TK.argsort(-1)
        wanted = case.tensors[f"layer.{layer}.topk_ids"]
        assert torch.equal(ids_TK.gather(-1, order), wanted.long()), where
        weights = case.tensors[f"layer.{layer}.topk_weights"]
        assert furthest(weights_TK.gather(-1, order), weights) <= WEIGHTS


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_greedy_ids(name):
    """Decoding from the cache after one whole prefill."""
    case, module = load_case(name), model()
    spec = read_model_spec(_config())
    count = len(case.tensors["greedy.ids"])
    states = make_states(spec, len(case.ids_T) + count)
    batch = cached_batch(0, len(case.ids_T))
    placed = whole_batch(case, module).features
    ids, found, step = case.ids_T, [], replace(batch, features=placed)
    for index in range(count):
        logits_1V = module.head(_last(module(ids, step, states)))
        top = logits_1V[0].topk(5)
        assert torch.equal(top.indices, case.tensors["greedy.top5_ids"][index].long())
        assert furthest(top.values, case.tensors["greedy.top5_logits"][index]) <= LOGITS
        found.append(int(top.indices[0]))
        ids = top.indices[:1]
        at = len(case.ids_T) + index
        step = cached_batch(at, at + 1)
    assert found == case.tensors["greedy.ids"].tolist()


@pytest.mark.parametrize("name", ["text_7", "image_alpha_dot"])
@torch.inference_mode()
def test_residual_stream(name):
    case, module = load_case(name), model()
    modules = {f"{i}.r": layer for i, layer in enumerate(module.layers)}
    for i, layer in enumerate(module.layers):
        modules[f"{i}.attn_in"], modules[f"{i}.mlp_in"] = layer.attention_mix, layer.mlp_mix
    seen, handles = spy({**modules, "mix": module.head.mix, "norm": module.head.norm})
    module.head(module(case.ids_T, whole_batch(case, module)))
    for handle in handles:
        handle.remove()
    for i in range(len(module.layers)):
        for part in ("attn_in", "mlp_in"):
            assert furthest(seen[f"{i}.{part}"], case.tensors[f"layer.{i}.{part}"]) <= RESIDUAL
        assert furthest(seen[f"{i}.r"].sum_TD, case.tensors[f"layer.{i}.r"]) <= RESIDUAL
    assert furthest(seen["mix"], case.tensors["final.mix"]) <= RESIDUAL
    assert furthest(seen["norm"], case.tensors["final.norm"]) <= RESIDUAL


@pytest.mark.parametrize(("name", "num_layers"), [("text_64", 9), ("text_1", 4)])
@torch.inference_mode()
def test_states_after_the_prompt(name, num_layers):
    case, module, spec = load_case(name), model(), read_model_spec(_config())
    states, count = make_states(spec, len(case.ids_T)), len(case.ids_T)
    module(case.ids_T, cached_batch(0, count), states)
    for layer in range(num_layers):
        want, state = f"state.layer.{layer}.", states[layer]
        if spec.config.is_mla[layer]:
            rows_TW = state.rows_PSW[1:].flatten(0, 1)[:count]
            wanted = torch.cat((case.tensors[want + "mla_c"], case.tensors[want + "mla_s"]), -1)
            assert furthest(rows_TW, wanted) <= STATES
            continue
        assert furthest(state.matrices_RHKV[1], case.tensors[want + "kda_S"]) <= STATES
        inputs = [case.tensors[f"{want}conv_{x}"] for x in "qkv"]
        assert furthest(state.inputs_RTC[1], torch.cat(inputs, -1)) <= STATES


@pytest.mark.parametrize("name", IMAGE_CASES)
@torch.inference_mode()
def test_image_features(name):
    case, module = load_case(name), model()
    for image in range(case.num_images):
        features = module.encode(pixels_of(case, image), [grid_of(case, image)])[0]
        assert furthest(features, case.tensors[f"image.{image}.features"]) <= FEATURES


@torch.inference_mode()
def test_vision_stages():
    case, module = load_case("image_alpha_dot"), model()
    grids = [grid_of(case, i) for i in range(case.num_images)]
    found: dict[str, list[Tensor]] = {}
    for index, grid in enumerate(grids):
        blocks = {f"block.{i}": b for i, b in enumerate(module.vision.blocks)}
        seen, handles = spy({**blocks, "merged": module.vision})
        first: list[Tensor] = []
        handle = module.vision.blocks[0].register_forward_pre_hook(
            lambda _module, args, first=first: first.append(args[0])
        )
        module.encode(pixels_of(case, index), [grid])
        for each in (*handles, handle):
            each.remove()
        seen |= {"patch_embed": first[0], "merged": seen["merged"][0]}
        for stage, value in seen.items():
            found.setdefault(stage, []).append(value)
    assert len(found) == 5
    for stage, values in found.items():
        assert furthest(torch.cat(values), case.tensors[f"vision.{stage}"]) <= FEATURES, stage


@torch.inference_mode()
def test_several_images_in_one_call_equal_each_alone():
    case, module = load_case("image_two"), model()
    grids = [grid_of(case, i) for i in range(2)]
    together = module.encode(torch.cat([pixels_of(case, i) for i in range(2)]), grids)
    for index, features in enumerate(together):
        assert furthest(features, case.tensors[f"image.{index}.features"]) <= FEATURES


@pytest.mark.parametrize(("name", "official_rms"), [("text_64", 0.087), ("image_alpha_dot", 0.152)])
@torch.inference_mode()
def test_bfloat16_errs_no_more_than_the_reference(name, official_rms):
    case, module = load_case(name), load_model(dtype=torch.bfloat16)
    logits = module.head(module(case.ids_T, whole_batch(case, module))).float()
    error = logits - case.tensors["logits"]
    assert float(error.square().mean().sqrt()) <= 1.5 * official_rms
    theirs = case.tensors["logits_bf16ref"].float() - case.tensors["logits"]
    assert float(theirs.square().mean().sqrt()) == pytest.approx(official_rms, rel=0.02)


@pytest.mark.parametrize("chunk", [1, 7, PAGE, 64])
@pytest.mark.parametrize("name", ["text_64", "image_two"])
@torch.inference_mode()
def test_chunks_equal_the_whole(name, chunk):
    case, module, spec = load_case(name), model(), read_model_spec(_config())
    count = len(case.ids_T)
    states, placed = make_states(spec, count), whole_batch(case, module).features
    rows = []
    for start in range(0, count, chunk):
        stop = min(start + chunk, count)
        batch = cached_batch(start, stop)
        if placed is not None:
            inside = (placed.index_M >= start) & (placed.index_M < stop)
            part = type(placed)(placed.index_M[inside] - start, placed.rows_MD[inside])
            batch = replace(batch, features=part)
        rows.append(module.head(module(case.ids_T[start:stop], batch, states)))
    assert furthest(torch.cat(rows), case.tensors["logits"]) <= LOGITS


def _config():
    return json.loads((CHECKPOINT / "config.json").read_text("utf-8"))


def _last(carry):
    return type(carry)(*(part[-1:] for part in carry))
