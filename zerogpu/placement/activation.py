"""From here on "cuda" is accepted in this process: what `zerogpu` does when torch is imported.

settings ──► devices.choose ──► meaning       what the word means: a device that is elsewhere, or the CPU
                            ──► cuda_api      what torch.cuda answers
                            ──► intercept     Tensor.to, factories, files
                            ──► crossing      how tensors travel to workers and back

Importing this module activates. A worker on a GPU that is the first to import torch needs none of it.
"""

from __future__ import annotations

import contextlib
import importlib

from .. import config
from ..config import Settings
from ..errors import ZeroGPUError
from ..process.tensors import Crossing, cross_with
from ..process.worker import in_worker
from . import cuda_api, devices, intercept, wrappers
from .crossing import Placing
from .cuda_state import state
from .generators import generator_of
from .meaning import Meaning, meaning
from .notes import note_once

__all__ = ["activate", "deactivate", "follow"]


def activate() -> None:
    """Choose the device and let this process accept it; again does nothing.

    Importing never fails: what is wrong with the settings is raised when a device is named, and when the
    app goes live.
    """
    if intercept.installed():
        return
    try:
        settings = config.read()
        kind = devices.choose(settings)
    except (ValueError, ZeroGPUError) as error:
        _set(Meaning(failure=error))
    else:
        _set(_meaning_of(kind))
        choice = devices.chosen()
        assert choice is not None
        devices.hide()
        cuda_api.install(choice, settings.cache_dir, generator=generator_of)
        cross_with(Placing() if meaning.placed else Crossing())
    intercept.install()
    wrappers.allow_swaps()
    importlib.import_module(".libraries", __package__).join()


def deactivate() -> None:
    """Take everything back, and choose anew at the next `activate`."""
    intercept.uninstall()
    cuda_api.uninstall()
    devices.forget()
    devices.restore()
    cross_with(Crossing())
    _set(Meaning())


def follow(settings: Settings) -> None:
    """Choose again if other settings were made before anything named a device.

    Raises:
        ZeroGPUError: the device was changed too late, or is not there.
        ValueError: another setting is out of range.
    """
    if intercept.installed():
        _choose_again(settings)
        if meaning.failure is not None:
            raise meaning.failure


def _choose_again(settings: Settings) -> None:
    if meaning.failure is None:
        try:
            devices.choose(settings)
        except ZeroGPUError:
            if meaning.used:
                raise
        else:
            return
    deactivate()
    activate()


def _configured() -> None:
    """`configure` was called: later lines of the app are to find the device that it names."""
    if intercept.installed():
        with contextlib.suppress(ValueError):  # of an environment variable: raised where it matters
            _choose_again(config.read())


config.on_configure(_configured)


def _meaning_of(kind: devices.Kind) -> Meaning:
    if kind == "cpu":
        return Meaning(note=note_once)
    return Meaning(
        placed=True,
        simulated=kind == "sim",
        count=len(devices.devices()),
        current=lambda: state.current,
    )


def _set(new: Meaning) -> None:
    for name, value in vars(new).items():
        setattr(meaning, name, value)


if not in_worker() or devices.kind() != "cuda":
    activate()
