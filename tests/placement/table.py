"""The forms in which programs name a device, each with where its result is on a host that has one.

One table for two meanings: on `sim` a result is where the row says, on `cpu` every result is on the CPU.
Values and dtypes are the same in both as when the program had not named a device at all.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

SECOND = torch.device("cuda", 1)


class Row(NamedTuple):
    name: str
    make: Callable[[], Any]
    device: str = "cuda:0"


def on_cpu() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


def on_device() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3).to("cuda")


def linear() -> nn.Linear:
    module = nn.Linear(3, 2)
    nn.init.ones_(module.weight)
    nn.init.ones_(module.bias)
    return module


def called(module: Any) -> Any:
    """A module that its first call has given its tensors."""
    module(on_device())
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return module


def meta_linear() -> nn.Linear:
    return nn.Linear(2, 2, device="meta")


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as another process of `torch.multiprocessing` gets it."""
    result: torch.Tensor = pickle.loads(ForkingPickler.dumps(tensor))
    with torch.no_grad():
        tensor.add_(1)
    assert torch.equal(result, tensor)
    return result


def in_context(make: Callable[[], Any], device: Any = "cuda") -> Any:
    with torch.device(device):
        return make()


def by_default(make: Callable[[], Any], device: Any = "cuda") -> Any:
    torch.set_default_device(device)
    try:
        return make()
    finally:
        torch.set_default_device(None)


def autocasted() -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return on_device() @ on_device().T


def backward() -> torch.Tensor:
    module = linear().to("cuda")
    module(on_device()).sum().backward()
    assert module.weight.grad is not None
    return module.weight.grad


def copied_grad() -> torch.Tensor:
    leaf = on_device().requires_grad_()
    leaf.square().sum().backward()
    copied = copy.deepcopy(leaf)
    assert copied.grad is not None
    assert copied.grad is not leaf.grad
    return copied.grad


def backward_through_to() -> torch.Tensor:
    weight = on_cpu().requires_grad_()
    (weight.to("cuda") * 2).sum().backward()
    assert weight.grad is not None
    return weight.grad


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def in_place() -> torch.Tensor:
    tensor = on_device()
    tensor.add_(1).mul_(2)
    return tensor


def data_assigned() -> torch.Tensor:
    tensor = on_cpu()
    tensor.data = on_device()
    return tensor


def data_taken_off() -> torch.Tensor:
    tensor = on_device()
    tensor.data = on_cpu()
    return tensor


def assigned_state() -> torch.Tensor:
    module = linear()
    module.load_state_dict(linear().to("cuda").state_dict(), assign=True)
    return module.weight


def tied() -> torch.Tensor:
    modules = nn.ModuleList([linear(), linear()])
    modules[1].weight = modules[0].weight
    moved = copy.deepcopy(modules.to("cuda")).half().float()
    assert moved[1].weight is moved[0].weight
    return moved[1].weight


def lazy_loaded() -> nn.Module:
    module = nn.LazyLinear(2).cuda()
    module.load_state_dict(linear().state_dict())
    return module


def dlpack_on_second() -> torch.Tensor:
    tensor = on_device().cuda(1)
    with torch.cuda.device(1):
        return torch.from_dlpack(tensor)


def seeded(seed: Callable[[int], Any]) -> torch.Tensor:
    seed(7)
    first = torch.rand(3, device="cuda")
    seed(7)
    assert torch.equal(first, torch.rand(3, device="cuda"))
    return torch.zeros_like(first)


def drawn() -> torch.Tensor:
    first = torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    again = torch.rand(3, device="cuda", generator=torch.Generator(device="cuda:0").manual_seed(3))
    assert torch.equal(first, again)
    return torch.zeros_like(first)


MOVES = [
    Row("to_device", lambda: on_cpu().to("cuda")),
    Row("to_device_with_index", lambda: on_cpu().to("cuda:0")),
    Row("to_second_device", lambda: on_cpu().to("cuda:1"), "cuda:1"),
    Row("to_number", lambda: on_cpu().to(0)),
    Row("to_second_number", lambda: on_cpu().to(1), "cuda:1"),
    Row("to_object", lambda: on_cpu().to(torch.device("cuda"))),
    Row("to_keyword", lambda: on_cpu().to(device="cuda")),
    Row("to_device_and_dtype", lambda: on_cpu().to("cuda", torch.float16)),
    Row("to_keywords", lambda: on_cpu().to(dtype=torch.float16, device="cuda")),
    Row("to_positional", lambda: on_cpu().to("cuda", torch.float16, True, True)),
    Row("to_non_blocking", lambda: on_cpu().to("cuda", non_blocking=True)),
    Row("to_copy", lambda: on_device().to("cuda", copy=True)),
    Row("to_memory_format", lambda: torch.ones(1, 2, 3, 4).to("cuda", memory_format=torch.channels_last)),
    Row("to_other", lambda: on_cpu().to(on_device().half())),
    Row("to_other_keyword", lambda: on_cpu().to(tensor=on_device().half())),
    Row("to_other_on_cpu", lambda: on_device().to(on_cpu().double()), "cpu"),
    Row("to_dtype", lambda: on_device().to(torch.float16)),
    Row("to_dtype_keyword", lambda: on_device().to(dtype=torch.float16)),
    Row("to_cpu", lambda: on_device().to("cpu"), "cpu"),
    Row("to_cpu_and_dtype", lambda: on_device().to("cpu", torch.float16), "cpu"),
    Row("cuda", lambda: on_cpu().cuda()),
    Row("cuda_number", lambda: on_cpu().cuda(0)),
    Row("cuda_device", lambda: on_cpu().cuda(device="cuda:1", non_blocking=True), "cuda:1"),
    Row("cpu", lambda: on_device().cpu(), "cpu"),
    Row("type_cuda", lambda: on_cpu().type("torch.cuda.HalfTensor")),
    Row("type_cpu", lambda: on_device().type("torch.DoubleTensor"), "cpu"),
    Row("type_dtype", lambda: on_device().type(torch.float16)),
    Row("type_as", lambda: on_cpu().type_as(on_device())),
    Row("half", lambda: on_device().half()),
    Row("data", lambda: on_device().data),
    Row("data_assigned", data_assigned),
    Row("data_taken_off", data_taken_off, "cpu"),
    Row("numpy", lambda: torch.from_numpy(on_cpu().numpy()).cuda()),
    Row("numpy_back", lambda: torch.from_numpy(on_device().cpu().numpy()), "cpu"),
    Row("pinned", lambda: on_cpu().pin_memory(), "cpu"),
    Row("pinned_factory", lambda: torch.zeros(2, pin_memory=True), "cpu"),
]

FACTORIES = [
    Row("empty", lambda: torch.empty(2, device="cuda").zero_()),
    Row("empty_strided", lambda: torch.empty_strided((2, 2), (1, 2), device="cuda").zero_()),
    Row("zeros", lambda: torch.zeros(2, 3, device="cuda")),
    Row("zeros_number", lambda: torch.zeros(2, device=0)),
    Row("zeros_second", lambda: torch.zeros(2, device="cuda:1"), "cuda:1"),
    Row("zeros_dtype", lambda: torch.zeros(2, device="cuda", dtype=torch.bfloat16)),
    Row("zeros_pinned", lambda: torch.zeros(2, device="cuda", pin_memory=False)),
    Row("ones", lambda: torch.ones(2, device=torch.device("cuda", 0))),
    Row("full", lambda: torch.full((2,), 3.0, device="cuda")),
    Row("arange", lambda: torch.arange(5, device="cuda")),
    Row("arange_step", lambda: torch.arange(0, 5, 2, device="cuda")),
    Row("linspace", lambda: torch.linspace(0, 1, 3, device="cuda")),
    Row("logspace", lambda: torch.logspace(0, 1, 3, device="cuda")),
    Row("eye", lambda: torch.eye(3, device="cuda")),
    Row("rand", lambda: torch.rand(3, device="cuda") * 0),
    Row("randn", lambda: torch.randn(3, device="cuda") * 0),
    Row("randint", lambda: torch.randint(0, 1, (3,), device="cuda")),
    Row("randperm", lambda: torch.randperm(1, device="cuda")),
    Row("normal", lambda: torch.normal(0.0, 0.0, (2,), device="cuda")),
    Row("tril_indices", lambda: torch.tril_indices(3, 3, device="cuda")),
    Row("triu_indices", lambda: torch.triu_indices(3, 3, device="cuda")),
    Row("hann_window", lambda: torch.hann_window(4, device="cuda")),
    Row("fftfreq", lambda: torch.fft.fftfreq(4, device="cuda")),
    Row("scalar_tensor", lambda: torch.scalar_tensor(2, device="cuda")),
    Row("complex", lambda: torch.zeros(2, dtype=torch.complex64, device="cuda")),
    Row("sparse", lambda: torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), device="cuda").to_dense()),
    Row("tensor", lambda: torch.tensor([1, 2.0], device="cuda")),
    Row("tensor_of_number", lambda: torch.tensor(1.0, device="cuda")),
    Row("as_tensor", lambda: torch.as_tensor([1, 2.0], device="cuda")),
    Row("as_tensor_of_array", lambda: torch.as_tensor(np.ones(2), device="cuda")),
    Row("as_tensor_of_tensor", lambda: torch.as_tensor(on_cpu(), device="cuda")),
    Row("as_tensor_again", lambda: torch.as_tensor(on_device())),
    Row("asarray", lambda: torch.asarray(np.ones(2), device="cuda")),
    Row("cuda_float_tensor", lambda: torch.cuda.FloatTensor([1, 2])),
    Row("zeros_like", lambda: torch.zeros_like(on_cpu(), device="cuda")),
    Row("ones_like", lambda: torch.ones_like(on_device())),
    Row("empty_like", lambda: torch.empty_like(on_device()).zero_()),
    Row("full_like", lambda: torch.full_like(on_cpu(), 1, device=0)),
    Row("rand_like", lambda: torch.rand_like(on_device()) * 0),
    Row("randn_like", lambda: torch.randn_like(on_cpu(), device="cuda") * 0),
    Row("like_on_cpu", lambda: torch.zeros_like(on_device(), device="cpu"), "cpu"),
    Row("new_zeros", lambda: on_device().new_zeros(2)),
    Row("new_ones_elsewhere", lambda: on_cpu().new_ones(2, device="cuda")),
    Row("new_ones_number", lambda: on_cpu().new_ones(2, device=0)),
    Row("new_on_cpu", lambda: on_device().new_full((2,), 1.0, device="cpu"), "cpu"),
    Row("new_tensor", lambda: on_device().new_tensor([1.0])),
    Row("new_empty", lambda: on_device().new_empty(2).zero_()),
    Row("in_context", lambda: in_context(lambda: torch.zeros(2))),
    Row("in_context_tensor", lambda: in_context(lambda: torch.tensor([1.0]))),
    Row("in_context_as_tensor", lambda: in_context(lambda: torch.as_tensor([1.0]))),
    Row("in_context_second", lambda: in_context(lambda: torch.zeros(2), "cuda:1"), "cuda:1"),
    Row("in_context_on_cpu", lambda: in_context(lambda: torch.zeros(2, device="cpu")), "cpu"),
    Row("in_context_module", lambda: in_context(lambda: nn.init.ones_(nn.Linear(2, 2).weight))),
    Row("by_default", lambda: by_default(lambda: torch.zeros(2))),
    Row("by_default_number", lambda: by_default(lambda: torch.zeros(2), 1), "cuda:1"),
    Row("by_default_tensor", lambda: by_default(lambda: torch.tensor([1.0]))),
    Row("seeded", lambda: seeded(torch.manual_seed)),
    Row("drawn", drawn),
]

OPERATIONS = [
    Row("index", lambda: on_device()[0]),
    Row("index_by_cpu_tensor", lambda: on_device()[torch.tensor([0])]),
    Row("mask", lambda: on_device()[on_device() > 2]),
    Row("view", lambda: on_device().view(3, 2).T),
    Row("chunk", lambda: on_device().chunk(2)[1]),
    Row("unbind", lambda: on_device().unbind()[0]),
    Row("max_values", lambda: on_device().max(0).values),
    Row("max_indices", lambda: on_device().max(0).indices),
    Row("in_place", in_place),
    Row("out", lambda: torch.add(on_device(), 1, out=on_device())),
    Row("number_from_cpu", lambda: on_device() + torch.tensor(2.0)),
    Row("where", lambda: torch.where(on_device() > 2, on_device(), 0.0)),
    Row("stack", lambda: torch.stack([on_device(), on_device()])),
    Row("einsum", lambda: torch.einsum("ij,ij->i", on_device(), on_device())),
    Row("copy_to", lambda: on_device().copy_(on_cpu() + 1)),
    Row("copy_from", lambda: on_cpu().copy_(on_device() + 1), "cpu"),
    Row("detach", lambda: on_device().requires_grad_().detach()),
    Row("attention", lambda: nn.functional.scaled_dot_product_attention(*[on_device()[None, None]] * 3)),
    Row("interpolate", lambda: nn.functional.interpolate(on_device()[None, None], scale_factor=2)),
    Row("lstm", lambda: nn.LSTM(3, 2).to("cuda")(on_device())[0] * 0),
    Row("multihead", lambda: nn.MultiheadAttention(3, 1).cuda()(*[on_device()] * 3)[0] * 0),
    Row("autocast", autocasted),
    Row("vmap", lambda: torch.vmap(lambda x: x * on_device()[0])(on_device())),
    Row("grad", lambda: torch.func.grad(lambda x: (x * on_device()).sum())(on_device())),
    Row("grad_and_value", lambda: torch.func.grad_and_value(torch.sum)(on_device())[1]),
    Row("hessian", lambda: torch.func.hessian(lambda x: (x**3).sum())(on_device()[0])),
    Row("jacfwd", lambda: torch.func.jacfwd(torch.sin)(on_device()[0])),
    Row("jvp", lambda: torch.func.jvp(torch.sin, (on_device(),), (on_device(),))[1]),
    Row("vjp", lambda: torch.func.vjp(torch.sin, on_device())[0]),
    Row("vjp_function", lambda: torch.func.vjp(torch.sin, on_device())[1](on_device())[0]),
    Row("linearize", lambda: torch.func.linearize(lambda x: x * on_device(), on_device())[0]),
    Row("linearize_function", lambda: torch.func.linearize(linear().cuda(), on_device())[1](on_device())),
    Row("functionalize", lambda: torch.func.functionalize(doubled)(on_device())),
    Row("scripted", lambda: torch.jit.script(doubled)(on_device())),
    Row("scripted_module", lambda: torch.jit.script(linear()).cuda()(on_device())),
    Row("traced", lambda: torch.jit.trace(doubled, on_device())(on_device())),
    Row("backward", backward),
    Row("backward_through_to", backward_through_to, "cpu"),
]

MODULES = [
    Row("module_to", lambda: linear().to("cuda").weight),
    Row("module_to_number", lambda: linear().to(0).weight),
    Row("module_to_second", lambda: linear().to("cuda:1").weight, "cuda:1"),
    Row("module_to_dtype", lambda: linear().to("cuda", torch.float16).weight),
    Row("module_to_tensor", lambda: linear().to(on_device()).weight),
    Row("module_cuda", lambda: linear().cuda().bias),
    Row("module_cuda_number", lambda: linear().cuda(1).bias, "cuda:1"),
    Row("module_cpu", lambda: linear().cuda().cpu().weight, "cpu"),
    Row("module_half", lambda: linear().cuda().half().weight),
    Row("module_call", lambda: linear().cuda()(on_device())),
    Row("module_made_there", lambda: nn.init.ones_(nn.Linear(2, 2, device="cuda").weight)),
    Row(
        "module_to_empty",
        lambda: nn.init.ones_(nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight),
    ),
    Row("buffer", lambda: nn.BatchNorm1d(2).cuda().running_var),
    Row("parameter", lambda: nn.Parameter(on_device())),
    Row("parameter_of_cpu", lambda: nn.Parameter(on_device().cpu()), "cpu"),
    Row("parameter_class", lambda: type(linear().cuda().weight)(on_device(), requires_grad=False)),
    Row("assigned_state", assigned_state),
    Row("loaded_state", lambda: (m := linear().cuda(), m.load_state_dict(linear().state_dict()))[0].weight),
    Row("tied", tied),
    Row("lazy", lambda: called(nn.LazyLinear(2).cuda()).weight),
    Row("lazy_to_half", lambda: called(nn.LazyLinear(2).to("cuda", torch.float16).float()).bias),
    Row("lazy_there_and_back", lambda: called(nn.LazyLinear(2).cuda().cpu().to("cuda")).weight),
    Row("lazy_made_there", lambda: called(in_context(lambda: nn.LazyLinear(2))).weight),
    Row("lazy_copied", lambda: called(copy.deepcopy(nn.LazyLinear(2).cuda())).weight),
    Row("lazy_second", lambda: nn.LazyLinear(2).cuda(1)(on_device().cuda(1)).detach() * 0, "cuda:1"),
    Row("lazy_loaded", lambda: lazy_loaded().weight),
    Row("lazy_buffer", lambda: called(nn.LazyBatchNorm1d().cuda()).running_mean),
    Row("lazy_buffer_half", lambda: called(nn.LazyBatchNorm1d().cuda().half().float()).running_var),
]

COPIES = [
    Row("deepcopy", lambda: copy.deepcopy(on_device())),
    Row("deepcopy_grad", copied_grad),
    Row("deepcopy_module", lambda: copy.deepcopy(linear().cuda()).weight),
    Row("copy", lambda: copy.copy(on_device())),
    Row("pickle", lambda: pickle.loads(pickle.dumps(on_device()))),
    Row("pickle_parameter", lambda: pickle.loads(pickle.dumps(linear().cuda().weight))),
    Row("dlpack", lambda: torch.from_dlpack(on_device())),
    Row("dlpack_second", lambda: dlpack_on_second(), "cuda:1"),
    Row("dlpack_capsule", lambda: from_dlpack(torch.utils.dlpack.to_dlpack(on_device()))),
    Row("dlpack_old_capsule", lambda: from_dlpack(on_device().__dlpack__())),
    Row("dlpack_of_cpu", lambda: torch.from_dlpack(on_cpu()), "cpu"),
    Row("dlpack_to_device", lambda: torch.from_dlpack(on_cpu().numpy(), device="cuda")),
    Row("dlpack_to_cpu", lambda: torch.from_dlpack(on_device(), device="cpu"), "cpu"),
    Row("dlpack_copied", lambda: torch.from_dlpack(on_device(), copy=True)),
    Row("shared", lambda: shared(on_device())),
    Row("shared_part", lambda: shared(on_device()[1])),
    Row("shared_parameter", lambda: shared(linear().cuda().weight)),
    Row("save_and_load", lambda: torch.load(saved(on_device()))),
    Row("save_and_load_dict", lambda: torch.load(saved(linear().cuda().state_dict()))["weight"]),
    Row("load_parameter", lambda: torch.load(saved(linear().cuda().weight))),
    Row("load_all", lambda: torch.load(saved(linear().cuda()), weights_only=False).weight),
    Row("load_on_cpu", lambda: torch.load(saved(on_device()), map_location="cpu"), "cpu"),
    Row("load_to_device", lambda: torch.load(saved(on_cpu()), map_location="cuda")),
    Row(
        "load_to_second", lambda: torch.load(saved(on_cpu()), map_location=torch.device("cuda", 1)), "cuda:1"
    ),
    Row("load_by_map", lambda: torch.load(saved(on_device()), map_location={"cuda:0": "cuda:1"}), "cuda:1"),
    Row("load_by_function", lambda: torch.load(saved(on_cpu()), map_location=lambda s, _: s.cuda())),
    Row("untyped_storage", lambda: torch.empty(0).set_(on_cpu().untyped_storage()), "cpu"),
]

ROWS = [*MOVES, *FACTORIES, *OPERATIONS, *MODULES, *COPIES]
