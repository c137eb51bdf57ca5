"""The miniature Kimi K3 of tests/data/k3 and the values its reference implementation computes."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from firstlight.assembly.build import BuildOptions, assemble
from firstlight.assembly.source import open_source
from firstlight.kernels.builtin import reference_kernels
from firstlight.layers.layer_state import LayerState, PagedLatents, RecurrentSlots
from firstlight.layers.packed_batch import PackedBatch, PlacedFeatures, pack_whole
from firstlight.parallel.mesh import Mesh
from firstlight.sharding.layout import Layout
from firstlight.sharding.state_spec import LatentState, RecurrentState

K3 = Path(__file__).parents[1] / "data" / "k3"
CHECKPOINT = K3 / "checkpoint"
CPU = torch.device("cpu")
TEXT_CASES = ("text_1", "text_7", "text_64", "text_300")
IMAGE_CASES = ("image_two", "image_alpha_dot", "image_fit")
PAGE = 16


@dataclass(frozen=True)
class Case:
    """A prompt of the oracle and what is expected of it."""

    name: str
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def ids_T(self) -> Tensor:
        return self.tensors["input_ids"].long()

    @property
    def num_images(self) -> int:
        return len(self.facts.get("images") or [])


def load_case(name: str) -> Case:
    facts = json.loads((K3 / "cases" / f"{name}.json").read_text("utf-8"))
    return Case(name, facts, load_file(K3 / "cases" / f"{name}.safetensors"))


@torch.inference_mode(False)  # loading fills tensors from threads of its own
def load_model(
    folder: Path = CHECKPOINT,
    *,
    dtype: torch.dtype = torch.float32,
    kernels: Any = None,
    layout: Layout | None = None,
    rank: int = 0,
    group: Any = None,
    trainable: bool = False,
) -> Any:
    """Returns a rank's module, loaded the way a service loads it."""
    source = open_source(folder)
    return assemble(
        source.spec,
        source.weights,
        mesh=Mesh((layout or Layout()).place(rank), group),
        kernels=kernels or reference_kernels(),
        options=BuildOptions(dtype, CPU, 512, trainable=trainable),
    ).module


def pixels_of(case: Case, image: int) -> Tensor:
    """Normalised patches [N, 3, 14, 14] of one image."""
    table_C256, patches = case.tensors["pixel_norm_lut"], case.tensors[f"image.{image}.patches_u8"]
    return torch.stack([table_C256[c][patches[:, c].long()] for c in range(3)], 1)


def grid_of(case: Case, image: int) -> tuple[int, int, int]:
    frames, rows, columns = case.tensors[f"image.{image}.grid_thw"].tolist()
    return frames, rows, columns


def with_images(batch: PackedBatch, case: Case, module: Any) -> PackedBatch:
    """The batch of one case's prompt, its images encoded and put in their places."""
    if not case.num_images:
        return batch
    rows = [
        module.encode(pixels_of(case, i), [grid_of(case, i)])[0] for i in range(case.num_images)
    ]
    pad = json.loads((CHECKPOINT / "config.json").read_text("utf-8"))["media_placeholder_token_id"]
    index_M = (case.ids_T == pad).nonzero().squeeze(1)
    return replace(batch, features=PlacedFeatures(index_M, torch.cat(rows)))


def whole_batch(case: Case, module: Any) -> PackedBatch:
    return with_images(pack_whole([len(case.ids_T)]), case, module)


def make_states(spec: Any, tokens: int, *, tp: int = 1, rows: int = 1) -> list[LayerState]:
    """State of every layer with room for `rows` sequences of so many tokens; garbage inside."""
    pages = rows * -(-tokens // PAGE) + 1
    states: list[LayerState] = []
    for state in spec.states:
        if isinstance(state, LatentState):
            states.append(PagedLatents(torch.full((pages, PAGE, state.width), torch.nan), 1))
        else:
            assert isinstance(state, RecurrentState)
            size = (rows + 1, state.heads // tp, state.key_dim, state.value_dim)
            inputs = (rows + 1, state.conv_taps, state.conv_channels // tp)
            states.append(
                RecurrentSlots(torch.full(size, torch.nan), torch.full(inputs, torch.nan), 0)
            )
    return states


def cached_batch(start: int, stop: int) -> PackedBatch:
    """Tokens [start, stop) of one sequence that lives in slot 1 and in pages 1, 2, ..."""
    pages = -(-stop // PAGE)
    return PackedBatch(
        positions_T=torch.arange(start, stop),
        bounds=(0, stop - start),
        starts_B1=torch.tensor([0, stop - start], dtype=torch.int32),
        contexts_B=torch.tensor([stop], dtype=torch.int32),
        tables=(
            torch.ones(1, 1, dtype=torch.int32),
            torch.arange(1, pages + 1, dtype=torch.int32)[None],
        ),
    )
