"""Code of the app that runs in a backward pass sees placed gradients, and computes there as anywhere."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from zerogpu.placement import gradients, intercept
from zerogpu.placement.placed import is_placed

from .table import linear, on_cpu, on_device

pytestmark = pytest.mark.usefixtures("sim")


def leaf(device: str = "cuda") -> torch.Tensor:
    return torch.ones(3, device=device, requires_grad=True)


class Seen(list[str]):
    """Devices on which tensors were computed with."""

    def __call__(self, *tensors: Any) -> None:
        for tensor in tensors:
            self.append(str((tensor * torch.ones_like(tensor)).device))

    def doubled(self, grad: torch.Tensor) -> torch.Tensor:
        self(grad)
        return grad * torch.full((1,), 2.0, device=grad.device)


class Exp(torch.autograd.Function):
    """Saves its input and its output; notes what it sees."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: Seen) -> Any:
        y = x.exp()
        ctx.save_for_backward(x, y, None)
        ctx.seen = seen
        return y, x.cpu()

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_on_cpu: Any) -> Any:
        x, y, nothing = ctx.saved_tensors
        assert nothing is None
        ctx.seen(grad, grad_on_cpu, x, y)
        return grad * y, None


# -- hooks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_on_cpu", [False, True])
def test_a_tensor_hook_sees_and_returns_placed_gradients(start_on_cpu: bool) -> None:
    seen, x = Seen(), leaf()
    y = x * 3
    y.register_hook(seen.doubled)
    x.register_hook(seen.doubled)
    x.register_post_accumulate_grad_hook(lambda param: seen(param.grad))
    (y.sum().cpu() if start_on_cpu else y.sum()).backward()
    assert seen == ["cuda:0"] * 3
    assert x.grad is not None
    assert x.grad.tolist() == [12, 12, 12]


def test_a_hook_follows_its_tensor() -> None:
    seen, module = Seen(), linear()
    module.weight.register_hook(seen)
    module.cuda()
    module.bias.register_hook(seen)
    module(on_device()).sum().backward()
    module.cpu()(on_cpu()).sum().backward()
    module.cuda(1)(on_device().cuda(1)).sum().backward()
    assert sorted(seen) == ["cpu", "cpu", "cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_gradients_of_cpu_tensors_stay_there() -> None:
    seen, weight = Seen(), leaf("cpu")
    weight.register_hook(seen)
    moved = weight.to("cuda")
    moved.register_hook(seen.doubled)
    moved.sum().backward(retain_graph=True)
    grads = torch.autograd.grad(moved.sum(), [weight, moved], retain_graph=True)
    assert seen == ["cuda:0", "cpu"] * 2
    assert [str(grad.device) for grad in grads] == ["cpu", "cuda:0"]
    assert not is_placed(weight.grad)
    assert not is_placed(torch.autograd.grad(moved.sum().cpu(), weight)[0])


def test_a_removed_hook_is_not_called() -> None:
    seen, x = Seen(), leaf()
    x.register_hook(seen).remove()
    x.sum().backward()
    assert seen == []


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("needs_grad", [False, True])
def test_module_hooks_see_placed_gradients(needs_grad: bool) -> None:
    seen, module = Seen(), linear().cuda()
    module.register_full_backward_pre_hook(lambda _, outputs: (seen.doubled(outputs[0]),))
    module.register_full_backward_hook(
        lambda _, inputs, outputs: seen(*filter(torch.is_tensor, inputs + outputs))
    )
    given = on_device().requires_grad_(needs_grad)
    module(given).sum().backward()
    assert seen == ["cuda:0"] * (3 if needs_grad else 2)
    assert module.bias.grad is not None
    assert module.bias.grad.tolist() == [4, 4]


def test_a_hook_of_several_tensors_sees_placed_gradients() -> None:
    seen, x, y = Seen(), leaf(), leaf("cpu")
    torch.autograd.graph.register_multi_grad_hook([x, y], lambda grads: seen(*grads))
    (x * y.cuda()).sum().backward()
    assert seen == ["cuda:0", "cpu"]


def test_a_thread_of_the_app_may_go_backward() -> None:
    seen, x = Seen(), leaf()
    x.register_hook(seen)
    thread = threading.Thread(target=lambda: x.square().sum().backward())
    thread.start()
    thread.join()
    assert seen == ["cuda:0"]


def test_hooks_of_derivatives() -> None:
    x = leaf()
    y = x**3
    y.register_hook(lambda grad: grad * 2)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.autograd.grad(first.sum(), x)[0].tolist() == [12, 12, 12]
    batched = torch.autograd.grad(x**2, x, torch.eye(3, device="cuda"), is_grads_batched=True)[0]
    assert torch.equal(batched, torch.eye(3, device="cuda") * 2)


# -- functions -------------------------------------------------------------------------------------------


def test_a_function_sees_placed_gradients_and_what_it_saved() -> None:
    seen, x = Seen(), leaf()
    y, copy_on_cpu = Exp.apply(x, seen)  # type: ignore[no-untyped-call]
    (y.cpu() + copy_on_cpu).sum().backward()
    assert seen == ["cuda:0", "cpu", "cuda:0", "cuda:0"]
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp())


def test_a_function_is_checked_against_differences() -> None:
    x = torch.ones(3, device="cuda", dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Exp.apply(x, Seen())[0], x)  # type: ignore[no-untyped-call]


def test_what_is_compiled_goes_backward() -> None:
    seen, module = Seen(), linear().cuda()
    module.register_full_backward_hook(lambda _, inputs, outputs: None)
    module.weight.register_hook(seen)
    given = on_device().requires_grad_()
    compiled = torch.compile(module, backend="eager")
    compiled(given).sum().backward()
    assert seen[0] == "cuda:0"
    assert str(given.grad.device) == "cuda:0"  # type: ignore[union-attr]


# -- what is saved ---------------------------------------------------------------------------------------


def test_hooks_of_saved_tensors_see_placed_ones() -> None:
    packed, seen, x = Seen(), Seen(), leaf()

    def pack(tensor: torch.Tensor) -> Any:
        packed(tensor)
        return tensor.device, tensor.cpu()

    with saved_tensors_hooks(pack, lambda saved: saved[1].to(saved[0]) * torch.ones(3, device=saved[0])):
        y = Exp.apply(x.exp(), seen)[0]  # type: ignore[no-untyped-call]
        on_cpu().requires_grad_().exp()
    y.sum().backward()
    assert packed == ["cuda:0", "cuda:0", "cuda:0", "cpu"]
    assert seen == ["cuda:0", "cpu", "cuda:0", "cuda:0"]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Sigmoid(), nn.BatchNorm1d(3)).cuda()


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": True},
        {"use_reentrant": False},
        {
            "use_reentrant": False,
            "context_fn": partial(
                checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
            ),
        },
    ],
)
def test_checkpoints_compute_again(options: dict[str, Any]) -> None:
    module, given = network(), on_device().requires_grad_()
    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(module(given).square().sum(), given)
    torch.manual_seed(1)
    checkpoint.checkpoint(module, given, **options).square().sum().backward()
    assert str(given.grad.device) == "cuda:0"  # type: ignore[union-attr]
    assert torch.equal(given.grad, expected)  # type: ignore[arg-type]


def test_graphs_go_backward_after_uninstalling() -> None:
    x = leaf()
    y = Exp.apply(x, Seen())[0]  # type: ignore[no-untyped-call]
    y.register_hook(lambda grad: None)
    replaced = [vars(owner)[name] for owner, name, _ in gradients.replacements()]
    intercept.uninstall()
    try:
        y.sum().backward()
        assert x.grad is not None
        left = [vars(owner).get(name) for owner, name, _ in gradients.replacements()]
        assert not any(now is ours for now, ours in zip(left, replaced, strict=True))
    finally:
        intercept.install()
