"""The llama family against transformers, on tiny random checkpoints, whole and cut."""

import pytest
import torch
import torch.distributed as dist

from firstlight.assembly.build import BuildOptions, assemble
from firstlight.assembly.source import open_source
from firstlight.kernels.builtin import reference_kernels
from firstlight.layers.packed_batch import pack_whole
from firstlight.parallel.mesh import Mesh
from firstlight.sharding.layout import Layout
from tiny_models import CONFIGS, tiny_config, write_checkpoint

LENGTHS = (37, 64)
TOLERANCE = 2e-5
# Tensor parallel degrees each tiny model allows; KV heads are replicated where there are fewer.
DEGREES = (2, 4)


def prompts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 300, (n,), generator=generator) for n in LENGTHS]


def logits_of(folder, tp, rank=0):
    """Logits of both prompts in one packed batch; whole on the first rank only."""
    group = dist.group.WORLD if tp > 1 else None
    source = open_source(folder)
    module = assemble(
        source.spec,
        source.weights,
        mesh=Mesh(Layout(tp=tp).place(rank), group),
        kernels=reference_kernels(),
        options=BuildOptions(torch.float32, torch.device("cpu"), 128),
    ).module
    with torch.inference_mode():
        carry = module(torch.cat(prompts()), pack_whole(LENGTHS))
        return module.head(carry)


def logits_on_rank(folder, tp):
    logits = logits_of(folder, tp, dist.get_rank())
    return logits.clone() if dist.get_rank() == 0 else None


@pytest.fixture(params=sorted(CONFIGS))
def checkpoint(request, tmp_path):
    write_checkpoint(tmp_path, tiny_config(request.param))
    return tmp_path


def test_logits_equal_transformers(checkpoint):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        want = torch.cat([theirs(ids[None]).logits[0] for ids in prompts()])
    assert want.std() > 0.3  # a model that says the same to everything would prove nothing
    assert (logits_of(checkpoint, 1) - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("tp", DEGREES)
def test_logits_do_not_depend_on_tensor_parallelism(checkpoint, ranks, tp):
    whole = logits_of(checkpoint, 1)
    parts = ranks(tp).run(logits_on_rank, checkpoint, tp)
    assert (parts[0] - whole).abs().max() <= TOLERANCE
