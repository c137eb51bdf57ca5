"""Owns the host's copy of a batch's integers, which travels with the tensor on the device.

Knows no operation. A plain operation asks for bounds and pages in every layer; reading them back
from the device would have the host wait each time for all work before.
"""

from __future__ import annotations

import torch
from torch import Tensor

_COPY = "_firstlight_host_copy"


def send(host: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device; it keeps the one of the host. Neither may change after."""
    sent = host.to(device)
    if sent is not host:
        setattr(sent, _COPY, host)
    return sent


def on_host(tensor: Tensor) -> Tensor:
    """Returns the host's copy if the tensor has one, else the tensor itself."""
    copy: Tensor = getattr(tensor, _COPY, tensor)
    return copy
