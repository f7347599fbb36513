"""Random numbers: one generator per device, kept on the CPU.

Where "cuda" means the CPU, the generator of the device is the CPU's own. Seeding it through `torch.cuda`
does nothing there, as in torch; its state can be read and set, since torch would raise.
"""

from __future__ import annotations

from typing import Any

import torch

from .cuda_state import answers, state


@answers("torch.cuda.get_rng_state", noted=True)
def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return state.generators[state.index(device)].get_state()


@answers("torch.cuda.set_rng_state")
def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    state.generators[state.index(device)].set_state(new_state)


@answers("torch.cuda.initial_seed", noted=True)
def initial_seed() -> int:
    return state.generators[state.current].initial_seed()


@answers("torch.cuda.manual_seed")
def manual_seed(seed: int) -> None:
    if state.count:
        state.generators[state.current].manual_seed(int(seed))


@answers("torch.cuda.manual_seed_all")
def manual_seed_all(seed: int) -> None:
    for generator in state.generators[: state.count]:
        generator.manual_seed(int(seed))


@answers("torch.cuda.seed")
def seed() -> None:
    if state.count:
        state.generators[state.current].seed()


@answers("torch.cuda.seed_all")
def seed_all() -> None:
    """The same seed for all devices, as in torch."""
    if state.count:
        manual_seed_all(state.generators[0].seed())


@answers("torch._C._accelerator_getDefaultGenerator")
def default_generator(index: int) -> torch.Generator:
    return state.generators[state.index(index)]


@answers("torch.cuda._get_rng_state_offset", noted=True)
def get_rng_state_offset(device: Any = "cuda") -> int:
    """0: the generators here have no offset."""
    state.index(device)
    return 0


@answers("torch.cuda._set_rng_state_offset")
def set_rng_state_offset(offset: int, device: Any = "cuda") -> None:
    """Without effect: the generators here have no offset."""
    state.index(device)
