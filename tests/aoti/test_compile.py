"""Compiling: once for the same content, in one process or several, and never a wrong package."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

from tests.aoti.models import SIZE, Pool, Tiny, export_mixed, export_tiny, mixed
from zerogpu.aoti import CompiledGraph, aoti_apply, aoti_compile, cache
from zerogpu.aoti import compile as compiling
from zerogpu.aoti.package import clear_executable_stack, read_manifest
from zerogpu.errors import CompileError, IncompatiblePackageError


@pytest.fixture(autouse=True)
def quiet():
    # Inductor uses torch.jit, which warns that it is deprecated.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


@pytest.fixture
def never_lowers(monkeypatch):
    def lower(*args):
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiling, "lower", lower)


@pytest.fixture(scope="module")
def tiny(cache_dir):
    """Compiled at the same time in two forked processes, each in a fresh thread."""
    log = cache_dir / "lowered"
    gate, opened = os.pipe()
    pipes, children = [], []
    program = export_tiny()
    for _ in range(2):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(opened)
            thread = threading.Thread(target=_compile_in_child, args=(program, log, gate, write))
            thread.start()
            thread.join()
            os._exit(0)
        os.close(write)
        pipes.append(read)
        children.append(child)
    os.close(gate)
    os.close(opened)  # both start
    answers = []
    for read, child in zip(pipes, children, strict=True):
        with os.fdopen(read, "rb") as pipe:
            answers.append(pipe.read())
        os.waitpid(child, 0)
    return answers, log.read_text().split()


def _compile_in_child(program, log, gate, write):
    lower = compiling.lower

    def logged(*args):
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return lower(*args)

    compiling.lower = logged
    os.read(gate, 1)
    os.write(write, pickle.dumps(aoti_compile(program)))


def test_two_processes_that_compile_the_same_thing_compile_it_once(tiny):
    answers, lowered = tiny
    assert len(lowered) == 1
    first, second = (pickle.loads(answer) for answer in answers)
    assert first.path == second.path
    module = Tiny()
    aoti_apply(first, module)
    x = torch.randn(2, 3)
    with torch.no_grad():
        torch.testing.assert_close(module(x), torch.sin(x) * module.weight)


def test_a_compiled_graph_travels_small(tiny):
    assert all(len(answer) < 1000 for answer in tiny[0])


def test_a_second_start_compiles_nothing(tiny, never_lowers):
    assert aoti_compile(export_tiny()).path == pickle.loads(tiny[0][0]).path


def test_other_options_another_graph_or_other_constants_are_another_package(tiny, never_lowers, exported):
    for program, options in ((export_tiny(), {"max_autotune": True}), (_shifted(1.0), {})):
        with pytest.raises(CompileError, match="compiled again"):
            aoti_compile(program, **options)
    keys = {aoti_key(_shifted(value)) for value in (1.0, 1.0, 2.0)}
    assert len(keys) == 2


def _shifted(value):
    class Shifted(nn.Module):
        def forward(self, x):
            return x + torch.tensor([value, value, value])

    return torch.export.export(Shifted(), (torch.ones(2, 3),))


def aoti_key(program):
    constants = compiling.anonymous_constants(program)
    return compiling.content_key(program, {}, constants, "cpu")


@pytest.mark.parametrize("damage", ["truncated", "tampered", "no manifest", "another torch"])
def test_a_damaged_or_foreign_package_is_made_again_with_one_warning(
    tiny, damage, monkeypatch, compiled, tmp_path
):
    graph = pickle.loads(tiny[0][0])
    whole = shutil.copytree(graph.path, tmp_path / "whole")
    (library,) = graph.path.glob("data/aotinductor/model/*.so")
    manifest = graph.path / "manifest.json"
    for file in (library, manifest):
        file.chmod(0o644)
    if damage in ("truncated", "tampered"):
        content = bytearray(library.read_bytes())
        content[5000] ^= 1
        library.unlink()  # a new file: the old one may be mapped in this process, which would end by SIGBUS
        library.write_bytes(content[:1000] if damage == "truncated" else content)
    elif damage == "no manifest":
        manifest.unlink()
    else:
        data = json.loads(manifest.read_text())
        data["machine"]["torch"] = "2.7.0"
        manifest.write_text(json.dumps(data))
        with pytest.raises(IncompatiblePackageError, match="compiled for torch 2"):
            CompiledGraph(graph.path)
    made = []

    def remake(folder, *args):
        made.append(folder)
        shutil.copytree(whole, folder, dirs_exist_ok=True)

    monkeypatch.setattr(compiling, "_make_package", remake)
    with pytest.warns(RuntimeWarning, match="Compiling again: ") as caught:
        assert aoti_compile(export_tiny()).path == graph.path
    assert len([w for w in caught if w.category is RuntimeWarning]) == 1
    assert len(made) == 1
    read_manifest(graph.path, thorough=True)


def test_a_package_lost_after_start_makes_the_module_eager(tiny, tmp_path):
    copied = CompiledGraph(shutil.copytree(pickle.loads(tiny[0][0]).path, tmp_path / "copy"))
    module = Tiny()
    handle = aoti_apply(copied, module)
    shutil.rmtree(copied.path)
    with pytest.warns(RuntimeWarning, match="package"):
        module(torch.ones(2, 3))
    assert handle.counters == {"package": 1}


def test_what_a_killed_process_left_is_cleared(cache_dir):
    partial = cache_dir / "graphs" / "somekey.partial"
    partial.mkdir(parents=True)
    (partial / "rest").write_text("")

    def make(folder):
        assert list(folder.iterdir()) == []
        raise CompileError("stopped here")

    with pytest.raises(CompileError):
        cache.get_or_make("somekey", make)
    assert not partial.exists()


def test_sizes_that_lowering_fixed_are_in_the_guard():
    shapes = ({2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO},)
    program = torch.export.export(Pool(), (torch.ones(1, 2, 16, 16),), dynamic_shapes=shapes)
    graph = aoti_compile(program)
    module = Pool()
    handle = aoti_apply(graph, module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for size in (16, 18, 24, 32):
            x = torch.randn(1, 2, size, size)
            torch.testing.assert_close(module(x), Pool()(x))
    assert handle.counters["graph"] >= 1
    assert aoti_compile(program).path == graph.path


def test_weights_stay_outside_the_package(compiled):
    size = sum(file.stat().st_size for file in compiled.path.rglob("*") if file.suffix != ".so")
    assert size < 20_000
    names = {weight.name for weight in compiled.manifest.weights}
    assert {"shift", "plain", "norm.running_mean", "first.bias"} <= names
    tied = {(weight.name, *weight.tied) for weight in compiled.manifest.weights if weight.tied}
    assert {tuple(sorted(names)) for names in tied} == {("first.weight", "second.weight")}
    assert compiled.manifest.constants == ("lifted_tensor_0",)
    assert compiled.manifest.training is False


def stack_flags(library):
    content = library.read_bytes()
    (table,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    headers = [struct.unpack_from("<II", content, table + i * size) for i in range(count)]
    return [flags for kind, flags in headers if kind == 0x6474E551]


def test_the_library_asks_for_no_executable_stack(compiled, tmp_path):
    (library,) = compiled.path.glob("data/aotinductor/model/*.so")
    assert stack_flags(library) == [6]
    asking = tmp_path / "asking.so"
    content = bytearray(library.read_bytes())
    (table,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    for i in range(count):
        if struct.unpack_from("<I", content, table + i * size)[0] == 0x6474E551:
            struct.pack_into("<I", content, table + i * size + 4, 7)
    asking.write_bytes(content)
    assert stack_flags(asking) == [7]
    clear_executable_stack(asking)
    assert asking.read_bytes() == library.read_bytes()


def test_compiling_leaves_the_module_as_it_was(compiled, exported):
    module = mixed()
    before = {name: (id(t), type(t), t.clone()) for name, t in module.named_parameters()}
    aoti_compile(export_mixed(module))
    for name, tensor in module.named_parameters():
        identity, kind, value = before[name]
        assert (id(tensor), type(tensor)) == (identity, kind)
        assert torch.equal(tensor, value)
    assert "forward" not in vars(module)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen[0:1].add_(1)
        return x + self.seen


class Writes(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x * 2


class Sizes(nn.Module):
    def forward(self, x):
        return x + 1, x.shape[0]


class Scales(nn.Module):
    def forward(self, x, n):
        return x * n


DYNAMIC = torch.export.Dim.DYNAMIC


@pytest.mark.parametrize(
    ("module", "args", "shapes", "reason"),
    [
        (Counts(), (torch.ones(3),), None, "'check': it writes to its buffer 'seen'"),
        (Writes(), (torch.ones(3),), None, "'check': it writes to its input 'x'"),
        (Sizes(), (torch.ones(3),), ({0: DYNAMIC},), "'check': it returns a size"),
        (Scales(), (torch.ones(3), 3), ({}, DYNAMIC), "'check': input 'n' is a SymInt"),
    ],
)
def test_what_would_not_run_right_is_refused(module, args, shapes, reason, never_lowers):
    program = torch.export.export(module, args, dynamic_shapes=shapes)
    with pytest.raises(CompileError, match=reason):
        aoti_compile(program)


def test_a_failure_of_inductor_names_the_stage_and_the_reason(monkeypatch):
    def lower(*args):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiling, "lower", lower)
    with pytest.raises(CompileError, match="stage 'lower': RuntimeError: no compiler here"):
        aoti_compile(_shifted(3.0))


def test_a_cache_that_cannot_be_written_names_the_folder(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZEROGPU_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CompileError, match=r"stage 'store': .*file/graphs"):
        aoti_compile(_shifted(4.0))


def test_options_are_checked(exported):
    with pytest.raises(TypeError, match="no option 'max_autotun'; did you mean 'max_autotune'"):
        aoti_compile(exported, max_autotun=True)
    with pytest.raises(TypeError, match="'freezing' is set by zerogpu"):
        aoti_compile(exported, {"freezing": True})
    with pytest.raises(TypeError, match="returned, not Linear"):
        aoti_compile(nn.Linear(SIZE, SIZE))


def test_importing_the_package_does_not_import_torch():
    code = "import zerogpu.aoti, sys; assert 'torch' not in sys.modules; zerogpu.aoti.aoti_capture"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
