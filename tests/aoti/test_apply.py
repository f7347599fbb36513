"""Calls of a module that a graph serves: right results on every path, and the module stays whole."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn

from tests.aoti.models import SIZE, Mixed, arguments
from zerogpu.aoti import aoti_apply, last_path
from zerogpu.errors import GraphMismatchError


@pytest.fixture
def applied(compiled, module):
    with aoti_apply(compiled, module) as handle:
        yield handle


def compared(module, eager, *args, **kwargs):
    """Compare two runs with the same random numbers, both of which may raise."""
    results = []
    for part in (module, eager):
        torch.manual_seed(0)
        try:
            results.append(part(*args, **kwargs)[0]["y"])
        except RuntimeError as error:
            results.append(str(error))
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        torch.testing.assert_close(*results)


def same(module, eager, *args, **kwargs):
    with torch.no_grad():
        got, want = module(*args, **kwargs), eager(*args, **kwargs)
    torch.testing.assert_close(got[0]["y"], want[0]["y"])
    torch.testing.assert_close(got[1], want[1])
    assert (got[0]["count"], got[0]["none"]) == (3, None)
    assert list(got[0]) == list(want[0])


def test_a_matching_call_is_served_by_the_graph(applied, module, eager):
    args, kwargs = arguments()
    same(module, eager, *args, **kwargs)
    assert applied.last == "graph"
    assert last_path(module) == "graph"
    assert applied.counters == {"graph": 1}


def test_a_symbolic_batch_is_served_by_the_graph(applied, module, eager):
    for batch in (2, 7, 64):
        args, kwargs = arguments(batch)
        same(module, eager, *args, **kwargs)
    assert applied.counters == {"graph": 3}


def strided():
    (_, scale), kwargs = arguments()
    return (torch.randn(SIZE, 4).t(), scale), kwargs


@pytest.mark.parametrize(
    ("case", "argument", "reason"),
    [
        (lambda: arguments(1), "x", "shape"),
        (lambda: arguments(65), "x", "shape"),
        (lambda: ((arguments()[0][0], 3.0), arguments()[1]), "scale", "value"),
        (lambda: (arguments()[0], {}), "mask", "type"),
        (lambda: (arguments()[0], {**arguments()[1], "double": True}), "double", "structure"),
        (lambda: (arguments()[0], {"mask": torch.rand(4, SIZE).half()}), "mask", "dtype"),
        (strided, "x", "stride"),
    ],
)
def test_another_call_is_right_by_the_eager_method_with_one_warning(
    case, argument, reason, applied, module, eager
):
    args, kwargs = case()
    with pytest.warns(RuntimeWarning, match=f"runs eagerly: {argument}: "):
        same(module, eager, *args, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(module, eager, *args, **kwargs)
    assert applied.last == "eager"
    assert applied.counters == {reason: 2}


def test_a_mismatch_can_be_an_error_that_names_the_argument(compiled, module):
    args, kwargs = arguments()
    with (
        aoti_apply(compiled, module, on_mismatch="error") as handle,
        pytest.raises(GraphMismatchError, match=r"Mixed\.forward .* mask: got float16|float16"),
    ):
        module(*args, mask=kwargs["mask"].half())
    assert handle.counters == {"dtype": 1}


def test_a_call_that_is_wrong_for_the_module_raises_what_the_module_raises(applied, module):
    with pytest.warns(RuntimeWarning), pytest.raises(TypeError, match="unexpected keyword"):
        module(torch.ones(4, SIZE), nonsense=1)


def test_gradients_autocast_and_modes_go_to_the_eager_method(applied, module):
    (x, scale), kwargs = arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = module(x.clone().requires_grad_(), scale, **kwargs)
        assert result[0]["y"].requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x, scale, **kwargs)[1].dtype is torch.bfloat16
        with torch.device("cpu"):
            module(x, scale, **kwargs)
        torch.set_default_dtype(torch.float64)
        try:
            module(x, scale, **kwargs)
        except RuntimeError:
            pass  # the eager module itself has no answer to this
        finally:
            torch.set_default_dtype(torch.float32)
        batched = torch.func.vmap(lambda a: module(a, scale, **kwargs)[1])(x.expand(2, *x.shape))
        assert batched.shape == (2, *x.shape)
    assert applied.counters == {"gradient": 1, "autocast": 1, "mode": 3}


def lora(module):
    module.first = nn.Sequential(module.first, nn.Linear(SIZE, SIZE))


def hook(module):
    module.first.register_forward_hook(lambda part, args, output: output + 1)


def number(module):
    module.factor = 3.0


def training(module):
    module.drop.train()


def method(module):
    module.second.forward = lambda x: x


def flag(module):
    module.norm.track_running_stats = None


@pytest.mark.parametrize("change", [lora, hook, number, training, method, flag])
def test_a_module_that_changed_is_not_served_by_the_graph(change, applied, module, eager):
    args, kwargs = arguments()
    torch.manual_seed(0)
    change(module)
    change(eager)
    if change is lora:
        eager.first[1].load_state_dict(module.first[1].state_dict())
    with pytest.warns(RuntimeWarning, match="runs eagerly"):
        compared(module, eager, *args, **kwargs)
    assert applied.last == "eager"


def test_a_module_that_changed_back_is_served_again(applied, module, eager):
    args, kwargs = arguments()
    module.train()
    with pytest.warns(RuntimeWarning, match="training: is now True, compiled for False"):
        module(*args, **kwargs)
    module.eval()
    module.load_state_dict(eager.state_dict())
    same(module, eager, *args, **kwargs)
    assert applied.counters == {"training": 1, "graph": 1}


def test_a_graph_traced_in_eval_mode_does_not_serve_a_module_applied_in_training_mode(compiled, module):
    args, kwargs = arguments()
    handle = aoti_apply(compiled, module.train())
    with pytest.warns(RuntimeWarning, match="compiled with training=False"):
        module(*args, **kwargs)
    assert handle.counters == {"training": 1}


def in_place(module):
    with torch.no_grad():
        for tensor in (module.first.weight, module.norm.running_mean, module.shift, module.plain):
            tensor.add_(1)


def data(module):
    module.first.weight.data = module.first.weight.data + 1
    module.norm.running_var.data = module.norm.running_var.data + 1


def assign(module):
    state = {name: tensor + 1 for name, tensor in module.state_dict().items()}
    state["second.weight"] = state["first.weight"]
    module.load_state_dict(state, assign=True)
    module.second.weight = module.first.weight


def attributes(module):
    module.shift = module.shift * 2
    module.plain = module.plain * 2


def same_memory(module):
    # Address and size stay, only the order of the elements changes.
    module.first.weight.data = module.first.weight.data.t()


@pytest.mark.parametrize("change", [in_place, data, assign, attributes])
def test_weights_that_changed_are_the_ones_that_the_graph_reads(change, applied, module, eager):
    args, kwargs = arguments()
    same(module, eager, *args, **kwargs)
    change(module)
    change(eager)
    same(module, eager, *args, **kwargs)
    assert applied.counters == {"graph": 2}


def test_a_transposed_view_of_the_same_memory_is_noticed(applied, module, eager):
    args, kwargs = arguments()
    same(module, eager, *args, **kwargs)
    same_memory(module)
    same_memory(eager)
    with pytest.warns(RuntimeWarning, match="has stride"):
        same(module, eager, *args, **kwargs)


def untied(module):
    module.first.weight = nn.Parameter(module.first.weight.detach() * 2)


def halved(module):
    module.double()


def missing(module):
    module.plain = None


@pytest.mark.parametrize("change", [untied, halved])
def test_weights_that_no_longer_fit_make_it_eager(change, applied, module, eager):
    (x, scale), kwargs = arguments()
    change(module)
    change(eager)
    with pytest.warns(RuntimeWarning, match="runs eagerly: weight 'first"):
        compared(module, eager, x, scale, **kwargs)
    assert applied.counters == {"weights": 1}


@pytest.mark.parametrize("change", [untied, halved, missing])
def test_a_graph_is_not_applied_to_a_module_without_its_weights(change, compiled, module):
    change(module)
    with pytest.raises(GraphMismatchError, match="cannot be applied to this Mixed: weight"):
        aoti_apply(compiled, module)
    assert "forward" not in vars(module)


def test_the_module_stays_whole(compiled, module, eager):
    names = {name: id(tensor) for name, tensor in module.named_parameters()}
    with aoti_apply(compiled, module):
        args, kwargs = arguments()
        module(*args, **kwargs)
        assert list(module.state_dict()) == list(eager.state_dict())
        assert {name: id(tensor) for name, tensor in module.named_parameters()} == names
        assert inspect.signature(module.forward) == inspect.signature(eager.forward)
        assert isinstance(module, Mixed)
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            same(copied, eager, *args, **kwargs)
            assert last_path(copied) is None
            copied.factor = 5.0
            assert copied.forward.__self__ is copied
    assert "forward" not in vars(module)


def test_removing_brings_back_what_was_there(compiled, module):
    def replaced(*args, **kwargs):
        return Mixed.forward(module, *args, **kwargs)

    module.forward = replaced
    handle = aoti_apply(compiled, module)
    again = aoti_apply(compiled, module)
    again.remove()
    handle.remove()
    handle.remove()
    assert vars(module)["forward"] is replaced


def test_variants_share_a_module_and_the_guard_picks(compiled, module, eager):
    with aoti_apply([compiled, compiled], module) as handle:
        args, kwargs = arguments()
        same(module, eager, *args, **kwargs)
        assert handle.last == "graph"
    with pytest.raises(TypeError, match="takes a CompiledGraph"):
        aoti_apply([], module)


def in_child(function):
    """Run in a fork of this process, in a fresh thread, and return what the function returned."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        results = []

        def work():
            try:
                results.append(function())
            except BaseException as error:  # noqa: BLE001  (it travels to the parent)
                results.append(repr(error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        os.write(write, pickle.dumps(results[0]))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


def test_a_child_of_fork_binds_its_own_and_leaves_the_parents_alone(applied, module, eager):
    args, kwargs = arguments()
    module(*args, **kwargs)
    variant = vars(module)["forward"]._variants[0]
    inherited = variant._binding

    def work():
        from zerogpu.aoti import stand_in

        same(module, eager, *args, **kwargs)
        return variant._binding is inherited, inherited in stand_in._inherited, applied.last

    assert in_child(work) == (False, True, "graph")
    same(module, eager, *args, **kwargs)
    assert variant._binding is inherited


def test_children_see_each_their_own_weights(applied, module, eager):
    args, kwargs = arguments()

    def work():
        in_place(module)
        in_place(eager)
        same(module, eager, *args, **kwargs)
        return applied.last

    assert in_child(work) == "graph"
    same(module, eager, *args, **kwargs)
