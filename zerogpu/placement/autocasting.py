"""``torch.autocast("cuda")`` where the computing is the CPU's."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.autocast_mode import autocast

from .meaning import cuda_index

__all__ = ["start_autocast"]

_start: Any = autocast.__init__


def start_autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    """`torch.autocast.__init__`: float16 unless told otherwise, as on CUDA."""
    if isinstance(device_type, str) and cuda_index(device_type) is not None:
        device_type = "cpu"
        if not args and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.get_autocast_dtype("cuda")
    _start(self, device_type, *args, **kwargs)
