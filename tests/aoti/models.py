"""Small modules that hold what graphs get wrong most often."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SIZE = 8


class Mixed(nn.Module):
    """Tied weights, BatchNorm, a non-persistent buffer, a plain tensor, a number and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.second = nn.Linear(SIZE, SIZE)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(SIZE)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.randn(SIZE), persistent=False)
        self.plain = torch.randn(SIZE)
        self.factor = 2.0

    def forward(
        self,
        x: Tensor,
        scale: float = 1.0,
        *,
        mask: Tensor | None = None,
        double: bool = False,
    ) -> tuple[dict[str, Any], Tensor]:
        hidden = self.second(torch.relu(self.first(x)))
        y = self.norm(self.drop(hidden)) * scale * self.factor
        y = y + self.shift + self.plain + torch.tensor([float(i) for i in range(SIZE)])
        if mask is not None:
            y = y * mask
        return {"y": y * 2 if double else y, "count": 3, "none": None}, hidden


def mixed() -> Mixed:
    torch.manual_seed(0)
    module = Mixed().eval()
    module.norm.running_mean.uniform_()
    module.norm.running_var.uniform_(1, 2)
    return module


def arguments(batch: int = 4) -> tuple[tuple[Tensor, float], dict[str, Tensor]]:
    return (torch.randn(batch, SIZE), 2.0), {"mask": torch.rand(batch, SIZE)}


def export_mixed(module: nn.Module) -> torch.export.ExportedProgram:
    args, kwargs = arguments()
    batch = torch.export.Dim("batch", min=1, max=64)
    shapes = {"x": {0: batch}, "scale": None, "mask": {0: batch}}
    with torch.no_grad():
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * self.weight


def export_tiny() -> torch.export.ExportedProgram:
    return torch.export.export(Tiny(), (torch.ones(2, 3),))


class Pool(nn.Module):
    """Lowering specialises the sizes of this one, long after export has declared them free."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(x, (4, 4)) + 1
