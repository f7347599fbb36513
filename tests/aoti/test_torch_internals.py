"""The private names of torch that the package uses, in the form that it uses them."""

from __future__ import annotations

import inspect

import torch
import torch._inductor
from torch._inductor import codecache

from tests.aoti.models import export_mixed, mixed
from zerogpu.aoti import torch_internals


def test_this_torch_is_one_that_the_package_was_checked_on():
    assert torch.__version__.rpartition(".")[0] in torch_internals.CHECKED_ON


def test_the_loader_has_the_methods_in_the_form_that_we_call():
    loader = torch._C._aoti.AOTIModelPackageLoader
    constructor = "arg0: str, arg1: str, arg2: bool, arg3: typing.SupportsInt"
    assert constructor in loader.__init__.__doc__
    binding = "use_inactive: bool, check_full_update: bool, user_managed: bool"
    assert binding in loader.load_constants.__doc__
    assert "inputs: list" in loader.boxed_run.__doc__
    assert "-> list[str]" in loader.get_constant_fqns.__doc__


def test_lowering_has_the_form_that_we_call():
    parameters = list(inspect.signature(torch._inductor.aot_compile).parameters)
    assert parameters == ["gm", "args", "kwargs", "options"]
    assert all(isinstance(getattr(codecache, name), str) for name in torch_internals._HEADERS)


def test_a_program_shows_its_symbolic_sizes_and_guards():
    program = export_mixed(mixed())
    shape_env = torch_internals.shape_env_of(program)
    assert [str(size) for size in shape_env.var_to_range]
    assert shape_env.guards
    assert torch_internals.recorded_guards(program) is not None
    assert isinstance(program._guards_code, list)


def test_plain_tensor_attributes_become_named_buffers():
    unlifted = torch_internals.unlifted(export_mixed(mixed()))
    names = {name for name, _ in unlifted.named_buffers()}
    assert {"plain", "shift", "lifted_tensor_0"} <= names


def test_modes_are_seen_and_nothing_else():
    assert torch_internals.foreign_mode() is None
    with torch.device("cpu"):
        assert "function mode" in torch_internals.foreign_mode()
    with torch._subclasses.FakeTensorMode():
        assert "dispatch mode" in torch_internals.foreign_mode()
    seen = []
    torch.func.vmap(lambda x: seen.append(torch_internals.foreign_mode()) or x)(torch.ones(2))
    assert "torch.func" in seen[0]


def test_a_specification_survives_text():
    spec = export_mixed(mixed()).call_spec.in_spec
    again = torch_internals.spec_from_text(torch_internals.spec_to_text(spec))
    assert again == spec
    positional, keywords = torch_internals.children_of(again)
    assert (positional.type, keywords.type, keywords.context) == (tuple, dict, ["mask"])
    assert torch_internals.children_of(positional)[0].is_leaf()
