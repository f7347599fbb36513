"""What torch.cuda answers in a process that holds no GPU, and that it is torch's own again afterwards."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from zerogpu.config import Settings
from zerogpu.errors import CUDAInMainError, ZeroGPUError
from zerogpu.placement import cuda_api, devices, properties
from zerogpu.placement.cuda_entries import HARMLESS, doors
from zerogpu.placement.cuda_state import TABLE, state
from zerogpu.placement.notes import note_once

from .nvml import GIB, Card, use

KINDS = ("cuda", "sim", "cpu")
CARDS = (Card("GPU-aaaa-1"), Card("GPU-bbbb-2", "NVIDIA L4", 24 * GIB, 2 * GIB, (8, 9)))
BUILT = hasattr(torch._C, "_cuda_init")
"""Whether torch is a build for CUDA. Without a driver, whatever starts CUDA raises there."""

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    def put(kind: str, **hooks: Any) -> None:
        use(monkeypatch, *CARDS)
        devices.choose(Settings(device=kind, sim_devices=2, sim_memory=4 * GIB))
        choice = devices.chosen()
        assert choice is not None
        cuda_api.install(choice, tmp_path, **hooks)

    return put


@pytest.fixture
def clean() -> None:
    """The driver was not asked in this process yet: other tests may run in it that let torch do so."""
    if _poisoned():
        pytest.skip("another test in this process let torch ask the driver; run this file alone")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, install: Install) -> Iterator[str]:
    install(request.param)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*zerogpu was told")
        yield request.param


def _elapsed() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert start.query()
    return start.elapsed_time(end)


def _stream_inside() -> tuple[bool, bool]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        inside = torch.cuda.current_stream() == stream
    return inside, torch.cuda.current_stream() == torch.cuda.default_stream()


def _device_inside() -> tuple[int, int]:
    with torch.cuda.device(1):
        inside = torch.cuda.current_device()
    return inside, torch.cuda.current_device()


def _seeded() -> list[bool]:
    torch.cuda.manual_seed_all(7)
    states = torch.cuda.get_rng_state_all()
    torch.cuda.seed_all()
    changed = [not torch.equal(a, b) for a, b in zip(states, torch.cuda.get_rng_state_all(), strict=True)]
    torch.cuda.set_rng_state_all(states)
    return changed


def _waited() -> bool:
    one, other = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    one.wait_stream(other)
    one.wait_event(other.record_event())
    one.synchronize()
    return one.query() and one != other and other.priority == -1 and len({one, other}) == 2


ANSWERS: list[tuple[str, Callable[[], Any], Any, Any, Any]] = [
    # what is asked, how, and the answer on cuda, on sim and on cpu
    ("is_available", lambda: torch.cuda.is_available(), True, True, False),
    ("is_initialized", lambda: torch.cuda.is_initialized(), False, False, False),
    ("init", lambda: torch.cuda.init(), None, None, None),
    ("_lazy_init", lambda: torch.cuda._lazy_init(), None, None, None),
    ("device_count", lambda: torch.cuda.device_count(), 2, 2, 0),
    ("current_device", lambda: torch.cuda.current_device(), 0, 0, 0),
    ("device", _device_inside, (1, 0), (1, 0), (0, 0)),
    ("device_of", lambda: torch.cuda.device_of(torch.ones(1)).__enter__(), None, None, None),
    ("name", lambda: torch.cuda.get_device_name(), "NVIDIA H200", "zerogpu simulated GPU", None),
    ("name of 1", lambda: torch.cuda.get_device_name("cuda:1"), "NVIDIA L4", "zerogpu simulated GPU", None),
    ("capability", lambda: torch.cuda.get_device_capability(torch.device("cuda")), (9, 0), (8, 0), (0, 0)),
    ("capability of 1", lambda: torch.cuda.get_device_capability(1), (8, 9), (8, 0), (0, 0)),
    ("bf16", lambda: torch.cuda.is_bf16_supported(), True, True, False),
    ("real bf16", lambda: torch.cuda.is_bf16_supported(False), True, True, False),
    ("tf32", lambda: torch.cuda.is_tf32_supported(), True, True, False),
    ("peer", lambda: torch.cuda.can_device_access_peer(0, 1), False, False, False),
    ("free memory", lambda: torch.cuda.mem_get_info(1)[0], 22 * GIB - 100 * 2**20, 4 * GIB, None),
    ("memory", lambda: torch.cuda.mem_get_info()[1], 140 * GIB - 100 * 2**20, 4 * GIB, None),
    ("allocated", lambda: torch.cuda.memory_allocated(), 0, 0, 0),
    ("reserved", lambda: torch.cuda.max_memory_reserved("cuda"), 0, 0, 0),
    ("stats", lambda: torch.cuda.memory_stats()["allocated_bytes.all.peak"], 0, 0, 0),
    ("summary", lambda: "memory summary" in torch.cuda.memory_summary(), True, True, True),
    ("snapshot", lambda: torch.cuda.memory_snapshot(), [], [], []),
    ("reset", lambda: torch.cuda.reset_peak_memory_stats(), None, None, None),
    ("reset all", lambda: torch.cuda.reset_accumulated_memory_stats(0), None, None, None),
    ("empty_cache", lambda: torch.cuda.empty_cache(), None, None, None),
    ("synchronize", lambda: torch.cuda.synchronize("cuda:0"), None, None, None),
    ("ipc_collect", lambda: torch.cuda.ipc_collect(), None, None, None),
    ("fraction", lambda: torch.cuda.set_per_process_memory_fraction(0.5), None, None, None),
    ("backend", lambda: torch.cuda.get_allocator_backend(), "native", "native", "native"),
    ("utilization", lambda: torch.cuda.utilization(), 37, 0, 0),
    ("memory_usage", lambda: torch.cuda.memory_usage(), 12, 0, 0),
    ("temperature", lambda: torch.cuda.temperature(), 41, 0, 0),
    ("power", lambda: torch.cuda.power_draw(), 75000, 0, 0),
    ("clock", lambda: torch.cuda.clock_rate(), 1980, 0, 0),
    ("used", lambda: torch.cuda.device_memory_used(), GIB, 0, 0),
    ("processes", lambda: "no processes" in torch.cuda.list_gpu_processes(), False, True, True),
    ("random states", _seeded, [True, True], [True, True], []),
    ("elapsed", lambda: 15 < _elapsed() < 2000, True, True, True),
    ("streams", _waited, True, True, True),
    ("current stream", _stream_inside, (True, True), (True, True), (False, True)),
    ("capturing", lambda: torch.cuda.is_current_stream_capturing(), False, False, False),
    ("nvtx", lambda: torch.cuda.nvtx.range("x").__enter__(), None, None, None),
    ("profiler", lambda: torch.cuda.profiler.start(), None, None, None),
    ("cudart", lambda: torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart()), None, None, None),
    ("sync debug", lambda: torch.cuda.set_sync_debug_mode("warn"), None, None, None),
    ("autocast", lambda: torch.autocast("cuda", enabled=False).__enter__() is not None, True, True, True),
    ("scaler", lambda: torch.amp.GradScaler("cuda", enabled=False).is_enabled(), False, False, False),
    ("accelerator", lambda: str(torch.accelerator.current_accelerator()), "cuda", "cuda", "None"),
    ("any accelerator", lambda: torch.accelerator.is_available(), True, True, False),
    ("accelerators", lambda: torch.accelerator.device_count(), 2, 2, 0),
    ("current accelerator", lambda: torch.accelerator.current_device_index(), 0, 0, 0),
    ("accelerator synchronize", lambda: torch.accelerator.synchronize(), None, None, None),
]


@pytest.mark.filterwarnings("ignore:.*zerogpu was told", "ignore:.*not available")
@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: row[0].replace(" ", "_"))
@pytest.mark.parametrize("where", KINDS)
def test_the_answer_is(clean: None, install: Install, where: str, row: tuple[Any, ...]) -> None:
    install(where)
    answer, expected = row[1](), row[2 + KINDS.index(where)]
    if expected is None and answer is not None:
        assert where == "cpu", "the host's name and memory are what they are"
        expected = answer
    assert answer == expected
    assert not _poisoned(), "later forks could not use CUDA"


def _poisoned() -> bool:
    """Whether a fork of this process would be refused by torch, since the driver was asked here."""
    process = os.fork()
    if process == 0:
        os._exit(1 if BUILT and torch._C._cuda_isInBadFork() else 0)
    return os.waitpid(process, 0)[1] != 0


class TestInstalling:
    def test_every_attribute_is_back_afterwards(self, install: Install) -> None:
        before = _attributes()
        for kind in KINDS:
            devices.forget()
            install(kind)
            changed = [name for name, value in _attributes().items() if before[name] is not value]
            assert len(changed) > 90
            cuda_api.uninstall()
            after = _attributes()
            assert [name for name in before if after.get(name) is not before[name]] == []
            assert after.keys() == before.keys()

    def test_twice_is_once(self, install: Install) -> None:
        before = torch.cuda.synchronize
        install("sim")
        first = torch.cuda.synchronize
        install("sim")
        assert torch.cuda.synchronize is first
        cuda_api.uninstall()
        cuda_api.uninstall()
        assert torch.cuda.synchronize is before

    def test_a_name_taken_before_answers_too(self, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
        library: Any = ModuleType("a_library")
        library.count, library.sync = torch.cuda.device_count, torch.cuda.synchronize
        monkeypatch.setitem(sys.modules, "a_library", library)
        before = library.count
        install("sim")
        assert library.count() == 2
        library.sync()
        cuda_api.uninstall()
        assert library.count is before

    def test_a_name_taken_while_installed_is_torchs_own_afterwards(self, install: Install) -> None:
        install("sim")
        taken, event = torch.cuda.memory_stats, torch.cuda.Event
        assert taken()
        cuda_api.uninstall()
        assert taken() == {}, "as torch says before CUDA is started"
        if BUILT:
            assert type(event()) is torch.cuda.Event

    def test_torch_can_be_imported_later(self) -> None:
        code = """
import sys, wrapt
from zerogpu.config import Settings
from zerogpu.placement import devices
devices.hide()
devices.choose(Settings(device="sim"))
assert "torch" not in sys.modules
def install(torch):
    from zerogpu.placement import cuda_api
    cuda_api.install(devices.chosen(), Settings().cache_dir)
wrapt.register_post_import_hook(install, "torch")
import torch
print(torch.cuda.is_available(), torch.cuda.get_device_name())
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout.strip() == "True zerogpu simulated GPU", done.stderr

    def test_the_random_generators_are_the_ones_given(self, install: Install) -> None:
        made = [torch.Generator("cpu"), torch.Generator("cpu")]
        install("cuda", generator=lambda index: made[index])
        torch.cuda.manual_seed_all(11)
        assert [generator.initial_seed() for generator in made] == [11, 11]
        assert torch.cuda.default_generators == tuple(made)  # type: ignore[comparison-overlap]
        torch.manual_seed(12)
        assert made[1].initial_seed() == 12, "torch.manual_seed seeds the devices too"

    def test_what_is_placed_counts_as_allocated(self, install: Install) -> None:
        placed = [3 * GIB, GIB]
        install("sim", allocated=lambda index: placed[index])
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(1)) == (3 * GIB, GIB)
        assert torch.cuda.mem_get_info() == (GIB, 4 * GIB)
        placed[0] = 0
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 3 * GIB)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        assert torch.accelerator.memory_allocated(1) == GIB


def _attributes() -> dict[tuple[str, str], Any]:
    prefixes = ("torch.cuda", "torch.accelerator", "torch._C", "torch.backends", "torch.random")
    modules = {name: module for name, module in list(sys.modules.items()) if name.startswith(prefixes)}
    return {(m, name): value for m, module in modules.items() for name, value in vars(module).items()}


class TestDevices:
    def test_each_thread_has_a_current_device_of_its_own(self, install: Install) -> None:
        from threading import Thread

        install("sim")
        torch.cuda.set_device(1)
        seen: list[int] = []
        thread = Thread(target=lambda: seen.append(torch.cuda.current_device()))
        thread.start()
        thread.join()
        assert (seen, torch.cuda.current_device()) == ([0], 1)
        torch.cuda.set_device(-1)
        assert torch.cuda.current_device() == 1

    @pytest.mark.parametrize("device", [2, "cuda:7", torch.device("cuda", 5)])
    def test_a_device_that_is_not_there_is_an_error_as_in_torch(self, install: Install, device: Any) -> None:
        install("sim")
        for ask in (torch.cuda.set_device, torch.cuda.synchronize, torch.cuda.mem_get_info):
            with pytest.raises(RuntimeError, match=r"invalid device ordinal: .* only 2 device"):
                ask(device)
        with pytest.raises(AssertionError, match="Invalid device id"):
            torch.cuda.get_device_properties(device)

    def test_another_kind_of_device_is_a_value_error_as_in_torch(self, install: Install) -> None:
        install("sim")
        with pytest.raises(ValueError, match="Expected a cuda device"):
            torch.cuda.get_device_name("cpu")

    def test_a_simulated_worker_has_one_device_and_numbers_of_its_own(self, install: Install) -> None:
        install("sim")
        torch.cuda.manual_seed_all(3)
        cuda_api.enter_worker(devices.devices()[1])
        assert torch.cuda.device_count() == 1
        assert torch.cuda.is_initialized()
        assert torch.cuda.initial_seed() != 3
        assert torch.cuda.get_device_properties(0).uuid == "SIM-00000001"  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError):
            torch.cuda.set_device(1)

    def test_a_cuda_worker_has_torchs_own_functions(self, install: Install) -> None:
        before = torch.cuda.is_available
        install("cuda")
        devices.hide()
        cuda_api.enter_worker(devices.devices()[1])
        assert torch.cuda.is_available is before
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-bbbb-2"
        assert cuda_api.installed() is None

    @pytest.mark.skipif(not BUILT, reason="only a build for CUDA can start it")
    def test_a_fork_gets_as_far_as_the_driver(self, clean: None, install: Install) -> None:
        install("cuda")
        torch.cuda.init()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.manual_seed(1)
        process = os.fork()
        if process == 0:
            cuda_api.enter_worker(devices.devices()[0])
            try:
                torch.cuda.init()
            except RuntimeError as error:  # there is no driver, or no such device, on this machine
                os._exit(1 if "re-initialize" in str(error) else 0)
            os._exit(2)
        assert os.waitpid(process, 0)[1] == 0

    @pytest.mark.skipif(not BUILT, reason="only a build for CUDA keeps this mark")
    def test_a_worker_of_a_main_process_that_asked_the_driver_says_so(
        self, install: Install, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install("cuda")
        cuda_api.uninstall()
        monkeypatch.setattr(torch._C, "_cuda_isInBadFork", lambda: True)
        with pytest.raises(CUDAInMainError, match="Import zerogpu before torch"):
            cuda_api.enter_worker(devices.devices()[0])

    def test_the_architectures_are_asked_elsewhere(
        self, clean: None, install: Install, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """torch's own answer would make forks of this process unable to use CUDA."""
        install("cuda")
        known = {"properties": {}, "architectures": ["sm_80", "sm_90"]}
        monkeypatch.setattr(properties, "_known", {devices.devices()[0]: known})
        assert torch.cuda.get_arch_list() == ["sm_80", "sm_90"]
        assert "sm_90" in torch.cuda.get_gencode_flags()
        assert not _poisoned()

    def test_properties_can_be_pickled(self, install: Install) -> None:
        install("sim")
        found = torch.cuda.get_device_properties(0)
        assert pickle.loads(pickle.dumps(found)) == found


class TestStreams:
    def test_a_stream_says_where_it_is(self, install: Install) -> None:
        install("sim")
        stream = torch.cuda.Stream(device="cuda:1", priority=-9)
        assert (stream.device, stream.device_index, stream.device_type) == (torch.device("cuda:1"), 1, 1)
        assert stream.priority == -5, "the nearest there is"
        with stream:
            assert torch.cuda.current_device() == 1
        torch.accelerator.set_stream(stream)
        assert torch.accelerator.current_device_index() == 1
        assert torch.accelerator.current_stream(1) == stream  # type: ignore[comparison-overlap]

    @pytest.mark.parametrize("timed", [(False, True), (True, False)])
    def test_a_time_needs_events_that_measure(self, install: Install, timed: tuple[bool, bool]) -> None:
        install("sim")
        one, other = (torch.cuda.Event(enable_timing=on) for on in timed)
        one.record()
        other.record()
        with pytest.raises(ValueError, match="enable_timing"):
            one.elapsed_time(other)

    def test_a_time_needs_events_that_were_recorded(self, install: Install) -> None:
        install("sim")
        one, other = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        one.record()
        with pytest.raises(ValueError, match="recorded"):
            one.elapsed_time(other)

    def test_those_of_the_main_process_become_real_in_a_worker(
        self, install: Install, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install("sim")
        stream, event = torch.cuda.Stream(priority=-1), torch.cuda.Event(enable_timing=True)
        cuda_api.uninstall()
        made: list[Any] = []

        class Real:
            stream_id, cuda_stream, device = 5, 0xABC, torch.device("cuda:0")

            def __init__(self, **options: Any) -> None:
                self.options, self.recorded = options, None
                made.append(self)

            def record(self, stream: Any) -> None:
                self.recorded = stream

        monkeypatch.setattr(torch.cuda, "Stream", Real)
        monkeypatch.setattr(torch.cuda, "Event", Real)
        assert (stream.stream_id, stream.cuda_stream) == (5, 0xABC)
        event.record(stream)
        assert [real.options for real in made] == [
            {"priority": -1},
            {"enable_timing": True, "blocking": False},
        ]
        assert made[1].recorded is made[0]


REFUSED: dict[str, Callable[[], Any]] = {
    "torch.cuda.CUDAGraph": lambda: torch.cuda.CUDAGraph(),
    "torch.cuda.graph": lambda: torch.cuda.graph(None),  # type: ignore[arg-type]
    "torch.cuda.MemPool": lambda: torch.cuda.MemPool(),
    "torch.cuda.current_blas_handle": lambda: torch.cuda.current_blas_handle(),
    "torch.cuda.caching_allocator_alloc": lambda: torch.cuda.caching_allocator_alloc(8),
    "torch.cuda.make_graphed_callables": lambda: torch.cuda.make_graphed_callables(print, ()),
}


class TestRefusing:
    @pytest.mark.parametrize("what", REFUSED)
    def test_the_error_names_the_line_of_the_app_and_what_to_do(self, install: Install, what: str) -> None:
        install("cuda")
        with pytest.raises(CUDAInMainError) as caught:
            REFUSED[what]()
        line = REFUSED[what].__code__.co_firstlineno
        assert str(caught.value).startswith(f"{__file__}:{line} (in <lambda>) uses CUDA")
        for part in (what, "@zerogpu.gpu", "on_worker_start"):
            assert part in str(caught.value)

    @pytest.mark.parametrize("what", REFUSED)
    @pytest.mark.parametrize("where", ["sim", "cpu"])
    def test_elsewhere_it_says_what_is_not_there(self, install: Install, where: str, what: str) -> None:
        install(where)
        with pytest.raises(CUDAInMainError, match=r"simulated device|on the CPU"):
            REFUSED[what]()

    def test_a_library_between_is_named_too(
        self, install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        folder = tmp_path / "site-packages"
        folder.mkdir()
        (folder / "asking.py").write_text("import torch\n\ndef ask():\n    torch.cuda.CUDAGraph()\n")
        monkeypatch.syspath_prepend(str(folder))
        import asking  # type: ignore[import-not-found]

        install("cuda")
        with pytest.raises(CUDAInMainError) as caught:
            asking.ask()
        assert str(caught.value).startswith(f"{__file__}:")
        assert f"through {folder}/asking.py:4 (in ask)" in str(caught.value)

    @pytest.mark.skipif(not BUILT, reason="only a build for CUDA has these entry points")
    def test_starting_cuda_is_refused(self, install: Install) -> None:
        install("cuda")
        with pytest.raises(CUDAInMainError, match=f"^{__file__}"):
            torch._C._cuda_init()
        with pytest.raises(ZeroGPUError):
            torch._C._cuda_memorySnapshot(None)


NOT_REPLACED = {
    "of tensors, which placement answers for": (
        "BFloat16Storage BFloat16Tensor BoolStorage BoolTensor ByteStorage ByteTensor CharStorage CharTensor "
        "ComplexDoubleStorage ComplexFloatStorage DoubleStorage DoubleTensor FloatStorage FloatTensor "
        "HalfStorage HalfTensor IntStorage IntTensor LongStorage LongTensor ShortStorage ShortTensor"
    ),
    "exceptions, types and names for typing": (
        "AcceleratorError Any Callable CudaError DeferredCudaCallError Device NewType Optional "
        "OutOfMemoryError classproperty cudaStatus"
    ),
    "torch's own, on top of what is replaced": (
        "StreamContext cast device device_of get_gencode_flags get_rng_state_all set_rng_state_all "
        "is_tf32_supported lru_cache max_memory_allocated max_memory_cached max_memory_reserved "
        "memory_allocated memory_cached memory_reserved reset_max_memory_allocated reset_max_memory_cached "
        "stream"
    ),
    "ask the build, not the driver": "graph_annotations export_dot export_graph_data",
}


class TestCompleteness:
    def test_every_public_callable_is_replaced_or_listed_with_the_reason(self) -> None:
        listed = set(" ".join(NOT_REPLACED.values()).split())
        unknown = [
            name
            for name in dir(torch.cuda)
            if not name.startswith("_")
            and callable(getattr(torch.cuda, name))
            and getattr(getattr(torch.cuda, name), "__module__", "") != "typing"
            and f"torch.cuda.{name}" not in TABLE
            and name not in listed
        ]
        assert unknown == [], "new in this torch: answer them, or say why not"

    def test_every_accelerator_entry_point_is_answered(self) -> None:
        other = {"_accelerator_getAllocatorSettings", "_accelerator_setAllocatorSettings"}  # settings
        found = {name for name in dir(torch._C) if name.startswith("_accelerator_")} - other
        assert {name for name in found if f"torch._C.{name}" not in TABLE} == set()

    @pytest.mark.skipif(not BUILT, reason="only a build for CUDA has these entry points")
    def test_every_door_to_the_driver_is_answered_refused_or_harmless(self) -> None:
        types = {name for name in dir(torch._C) if isinstance(getattr(torch._C, name), type)}
        found = {name for name in dir(torch._C) if name.startswith("_cuda_")} - types - HARMLESS
        answered = {name.removeprefix("torch._C.") for name in (*TABLE, *doors())}
        assert found <= answered
        assert "_cuda_init" in answered

    @pytest.mark.skipif(not BUILT, reason="only a build for CUDA has these entry points")
    def test_what_is_called_harmless_starts_nothing(self, clean: None) -> None:
        for name in sorted(HARMLESS):
            process = os.fork()  # a setting that is changed by the call is changed in the child only
            if process == 0:
                os._exit(_starts_cuda(getattr(torch._C, name, lambda: None)))
            assert os.waitpid(process, 0)[1] == 0, name

    def test_nothing_in_the_table_starts_cuda(self, clean: None, kind: str) -> None:
        """On a build for CUDA whatever reaches the driver raises one of its own errors here."""
        skipped = {
            "torch.cuda.get_device_properties",
            "torch.cuda.get_arch_list",
            "torch._C._cuda_getArchFlags",
        }
        for name in TABLE.keys() - skipped:
            found = functools.reduce(lambda at, part: getattr(at, part, None), name.split(".")[1:], torch)
            if found is None:
                continue
            try:
                found()
            except (TypeError, CUDAInMainError):
                continue
        assert state.kind == kind
        assert not _poisoned()


def _starts_cuda(entry: Callable[..., Any]) -> bool:
    for args in ((), (1,), (True,), (True, 1e-3, 1e-3)):
        try:
            entry(*args)
        except TypeError:  # not the arguments that it takes
            continue
        except RuntimeError as error:
            return "driver" in str(error)
    return bool(torch._C._cuda_isInBadFork())


class TestTheNote:
    def test_the_cpu_is_noted_once_at_the_line_of_the_app(self, install: Install) -> None:
        install("cpu")
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            torch.cuda.synchronize()
            torch.cuda.get_device_name()
        assert "was told to use no GPU" in str(noted[0].message)
        assert [warning.filename for warning in noted] == [__file__]

    def test_the_note_says_what_auto_missed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, fails="Driver Not Loaded")
        devices.choose(Settings())
        with pytest.warns(UserWarning, match=r"found no GPU \(the NVIDIA driver .*Driver Not Loaded"):
            note_once()

    def test_what_torch_itself_allows_is_not_noted(self, install: Install) -> None:
        install("cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.cuda.is_available()
            torch.cuda.manual_seed_all(1)
            torch.cuda.empty_cache()
            torch.cuda.memory_allocated()
            torch.manual_seed(1)
