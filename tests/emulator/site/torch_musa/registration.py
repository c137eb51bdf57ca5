"""Owns the order in which torch learns of the emulated device; knows no operator."""

import os

import torch
import torch.distributed as dist

from torch_musa import device_module, mccl

VERSION = os.environ.get("EMULATED_MUSA_VERSION", "2.13.0+emulated")
SDK = os.environ.get("EMULATED_MUSA_SDK", "5.2.0")


def register() -> None:
    """Renames the device, registers `torch.musa`, its tensor methods and `mccl`.

    Architecture 21 has no collectives: builds for it are made without them.
    """
    torch.utils.rename_privateuse1_backend("musa")
    torch._register_device_module("musa", device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.version.musa = SDK  # type: ignore[attr-defined]
    if device_module.arch() > 21:
        dist.Backend.register_backend("mccl", mccl.create_group, devices=["musa"])
