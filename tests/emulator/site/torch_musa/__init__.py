"""The face of the emulated device: what programs find where the vendor's plug-in would be.

torch loads it through its `torch.backends` entry point, as it loads the vendor's. It registers the
device `musa`, the module `torch.musa` and the backend `mccl`; it knows nothing of firstlight.
"""

import torch
from musa_emulator import native_file

native_file.load(torch.__version__)

from torch_musa import registration  # noqa: E402

__version__ = registration.VERSION
registration.register()


def _autoload() -> None:
    """What torch calls; importing this package has done everything, as with the vendor's."""
