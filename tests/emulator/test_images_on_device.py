"""Images of the Kimi K3 miniature on the emulated device: the oracle's tokens, encoder and all."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from firstlight.schedule.request import MediaItem
from local_engine import EngineShape, LocalEngine, greedy
from tiny_kimi import K3_DATA, MINIATURE

TOKENS = 8


def read_case(name: str) -> tuple[list[int], list[MediaItem], list[int]]:
    """A prompt, its images, and the oracle's greedy continuation."""
    fields = json.loads((K3_DATA / "cases" / f"{name}.json").read_text("utf-8"))
    tensors = load_file(K3_DATA / "cases" / f"{name}.safetensors")
    pad = json.loads((MINIATURE / "config.json").read_text("utf-8"))["media_placeholder_token_id"]
    pads = [i for i, token in enumerate(fields["input_ids"]) if token == pad]
    media: list[MediaItem] = []
    for index, image in enumerate(fields["images"]):
        media.append(
            MediaItem(
                first=pads[sum(item.count for item in media)],
                count=image["tokens"],
                digest=f"{name} {index}",
                grid=tuple(tensors[f"image.{index}.grid_thw"].tolist()),
                patches=tensors[f"image.{index}.patches_u8"].numpy().tobytes(),
            )
        )
    return fields["input_ids"], media, fields["greedy_token_ids"]


def continued(name: str) -> tuple[list[int], list[str]]:
    from musa_emulator import control

    ids, media, _ = read_case(name)
    shape = EngineShape(num_slots=24, chunk_tokens=32)
    engine = LocalEngine(Path(MINIATURE), shape, device=torch.device("musa:0"))
    request = engine.submit(ids, greedy(TOKENS), media)
    while engine.step():
        pass
    assert engine.images is not None and engine.images.num_encoded == len(media) > 0
    return engine.outcomes[request].token_ids, control.take_races()


def test_a_prompt_with_two_images(emulated: Any) -> None:
    assert emulated().run(continued, "image_two")[0] == (read_case("image_two")[2][:TOKENS], [])
