"""Streams and events: on the CPU all work is done when a call returns, so they only keep order and time.

What the app made of them at module scope lives on in GPU workers: there each object makes a real one of
its own when it is first used, and passes everything on to it.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

from .cuda_state import TABLE, answers, refuse, state

__all__ = ["Event", "Stream"]

_cuda: Any = torch.cuda
"""torch's functions or ours, whichever stand there when they are called."""

_CUDA = 1
"""The number of the device type "cuda" in torch."""
_PRIORITIES = (0, -5)
"""The lowest and the highest priority of a stream, as NVIDIA's devices have them."""


class _Replaced(type):
    """Where nothing is installed any more, the class is torch's own: so are its new objects."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if state.kind is None:
            return getattr(torch.cuda, cls.__name__)(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        if type.__instancecheck__(cls, instance):
            return True
        real = getattr(torch.cuda, cls.__name__, cls)
        return real is not cls and isinstance(instance, real)


class _Lasting:
    """An object that stands for a real one in a GPU worker."""

    _made: Any = None

    def _make(self) -> Any:
        raise NotImplementedError

    def _real(self) -> Any:
        """The real one where there is a GPU, else None."""
        if state.kind is None and self._made is None:
            self._made = self._make()
        return self._made

    def query(self) -> bool:
        real = self._real()
        return bool(real.query()) if real is not None else True

    def synchronize(self) -> None:
        real = self._real()
        if real is not None:
            real.synchronize()


def _unwrapped(thing: Any) -> Any:
    return thing._real() if isinstance(thing, _Lasting) else thing


class Stream(_Lasting, metaclass=_Replaced):
    """Stands for `torch.cuda.Stream`; all work on it is done already."""

    _last_id = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        lowest, highest = _PRIORITIES
        self._index = kwargs.get("device_index", state.index(device))
        self._priority = max(highest, min(lowest, int(priority)))
        if "stream_id" in kwargs:
            self._id = int(kwargs["stream_id"])
        else:
            Stream._last_id += 1
            self._id = Stream._last_id

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        return _PRIORITIES

    def _make(self) -> Any:
        return _cuda.Stream(priority=self._priority) if self._id else _cuda.default_stream()

    @property
    def device(self) -> torch.device:
        real = self._real()
        return torch.device("cuda", self._index) if real is None else torch.device(real.device)

    @property
    def device_index(self) -> int:
        return self.device.index or 0

    @property
    def device_type(self) -> int:
        return _CUDA

    def is_capturing(self) -> bool:
        return False

    @property
    def native_handle(self) -> int:
        return self.cuda_stream

    @property
    def stream_id(self) -> int:
        real = self._real()
        return int(real.stream_id) if real is not None else self._id

    @property
    def cuda_stream(self) -> int:
        real = self._real()
        return int(real.cuda_stream) if real is not None else self._id

    @property
    def priority(self) -> int:
        return self._priority

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.cuda_stream)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        real = self._real()
        if real is not None:
            return real.record_event(event)
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._before = _cuda.current_stream(self.device)
        _cuda.set_stream(self)
        return self

    def __exit__(self, *_error: object) -> None:
        _cuda.set_stream(self._before)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return False
        return (self.device_index, self.cuda_stream) == (other.device_index, other.cuda_stream)

    def __hash__(self) -> int:
        return hash((self.cuda_stream, self.device))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class Event(_Lasting, metaclass=_Replaced):
    """Stands for `torch.cuda.Event`; the times are those of the clock."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._timed = enable_timing
        self._blocking = blocking
        self._time: int | None = None

    def _make(self) -> Any:
        return _cuda.Event(enable_timing=self._timed, blocking=self._blocking)

    @property
    def device(self) -> torch.device | None:
        return torch.device("cuda", state.current) if self._time is not None else None

    @property
    def cuda_event(self) -> int:
        real = self._real()
        return int(real.cuda_event) if real is not None else 0

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_event)

    def record(self, stream: Any = None) -> None:
        real = self._real()
        if real is not None:
            real.record(_unwrapped(stream))
        self._time = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        real = self._real()
        if real is not None:
            real.wait(_unwrapped(stream))

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event's record to the other's."""
        real = self._real()
        if real is not None:
            return float(real.elapsed_time(_unwrapped(end_event)))
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._time is None or end_event._time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return float(end_event._time - self._time) / 1e6

    def ipc_handle(self) -> bytes:
        raise refuse("torch.cuda.Event.ipc_handle")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> Any:
        raise refuse("torch.cuda.Event.from_ipc_handle")

    def __repr__(self) -> str:
        return "<torch.cuda.Event uninitialized>" if self._time is None else "<torch.cuda.Event recorded>"


TABLE["torch.cuda.Stream"] = Stream
TABLE["torch.cuda.Event"] = Event


@answers("torch.cuda.default_stream", noted=True)
def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=state.index(device))


@answers("torch.cuda.current_stream", noted=True)
def current_stream(device: Any = None) -> Stream:
    index = state.index(device)
    stream: Stream | None = getattr(state.local, "streams", {}).get(index)
    return stream if stream is not None else default_stream(index)


@answers("torch.cuda.set_stream", "torch._C._accelerator_setStream", noted=True)
def set_stream(stream: Any) -> None:
    """Makes the stream current on its device, and its device current, as in CUDA."""
    if stream is None:
        return
    index = state.valid(stream.device_index)
    streams = getattr(state.local, "streams", {})
    state.local.streams = {**streams, index: stream}
    state.exchange(index)


@answers("torch.cuda._set_stream_by_id", "torch._C._cuda_setStream")
def set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    set_stream(Stream(stream_id=stream_id, device_index=device_index))


@answers("torch.cuda.synchronize", "torch._C._accelerator_synchronizeDevice", noted=True)
def synchronize(device: Any = None) -> None:
    """All work is done already."""
    state.index(device)


@answers("torch._C._cuda_synchronize")
def synchronize_current() -> None:
    """All work is done already."""


@answers("torch._C._cuda_getCurrentRawStream")
def raw_stream(index: int) -> int:
    return current_stream(index).cuda_stream
