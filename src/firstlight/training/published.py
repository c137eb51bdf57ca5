"""Owns the published form of a model's values: bf16, fp32 where the rules keep it, MXFP4 experts.

It knows the rule table's dtypes and no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from firstlight.kernels.mxfp4 import from_mxfp4, to_mxfp4
from firstlight.models.spec import ModelSpec
from firstlight.training.model import Trainable, held_values


def rounded_values(spec: ModelSpec, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns fp32 values as they are once published and read again."""
    kept = {rule.name for rule in spec.tensors if rule.dtype == "F32"}
    experts = {rule.name for rule in spec.tensors if rule.stacked}
    rounded = {}
    for name, value in values.items():
        if name in experts:
            rounded[name] = from_mxfp4(to_mxfp4(value))
        else:
            rounded[name] = value if name in kept else value.bfloat16().float()
    return rounded


@contextmanager
def as_published(model: Trainable) -> Iterator[None]:
    """Gives the model its published values for a while; its own come back.

    A backward pass in here computes gradients at the rounded values for the own ones: training
    that knows of the quantisation (straight-through, arXiv:1308.3432).
    """
    with held_values(model.module) as own:
        with torch.no_grad():
            for name, value in rounded_values(model.spec, own).items():
                model.module.get_parameter(name).copy_(value)
        yield
