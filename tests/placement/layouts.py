"""More rows for the table: sparse, nested and quantised tensors, each seen through a dense one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from .table import Row, on_cpu, on_device, saved


def coo(values: Any = None, **options: Any) -> torch.Tensor:
    indices = torch.tensor([[0, 1], [1, 0]], device="cuda")
    values = torch.tensor([1.0, 2.0], device="cuda") if values is None else values
    return torch.sparse_coo_tensor(indices, values, (2, 2), **options)


def compressed(make: Callable[..., torch.Tensor], **options: Any) -> torch.Tensor:
    values = torch.arange(2.0, device="cuda")
    if make in (torch.sparse_bsr_tensor, torch.sparse_bsc_tensor):
        values = values.reshape(2, 1, 1)
    crossed, plain = (torch.tensor(numbers, device="cuda") for numbers in ([0, 1, 2], [0, 1]))
    return make(crossed, plain, values, (2, 2), **options)


def written(make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The values of a sparse tensor after what it was made from has changed."""
    values = torch.ones(2, device="cuda")
    made = make(values)
    values.zero_()
    return made.coalesce().values()


def sparse_grad() -> Any:
    values = torch.ones(2, device="cuda", requires_grad=True)
    (coo(values) @ torch.ones(2, 2, device="cuda")).sum().backward()
    return values.grad


def sparse_optimized() -> torch.Tensor:
    module = torch.nn.Embedding.from_pretrained(on_device(), freeze=False, sparse=True)
    module(torch.tensor([1], device="cuda")).sum().backward()
    torch.optim.SparseAdam(module.parameters(), lr=0.5).step()
    return module.weight


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.eye(2).to_sparse())


def loaded(tensor: torch.Tensor, **options: Any) -> Any:
    return torch.load(saved(tensor), **options)


def marked() -> torch.Tensor:
    tensor: Any = on_device()
    tensor.note = "a"
    result = loaded(tensor)
    assert result.note == "a"
    return torch.as_tensor(result)


SPARSE = [
    Row("coo", lambda: coo().to_dense()),
    Row(
        "coo_by_name",
        lambda: torch.sparse_coo_tensor(indices=[[0], [1]], values=coo()._values()[:1])._values(),
    ),
    Row("coo_of_cpu_values", lambda: coo(torch.ones(2)).to_dense(), "cpu"),
    Row("coo_on_cpu", lambda: coo(device="cpu").to_dense(), "cpu"),
    Row("coo_of_cpu_values_there", lambda: coo(torch.ones(2), device="cuda").to_dense()),
    Row("coo_indices", lambda: coo().coalesce().indices()),
    Row("coo_values", lambda: coo().coalesce().values()),
    Row("coo_product", lambda: coo() @ on_device()[:, :2]),
    Row("coo_cpu", lambda: coo().cpu().to_dense(), "cpu"),
    Row("coo_back", lambda: coo().cpu().to("cuda").to_dense()),
    Row("coo_half", lambda: coo().half().to_dense()),
    Row("coo_shares", lambda: written(coo)),
    *(
        Row(f"{name}{way}", lambda make=make, see=see: see(compressed(make)), device)
        for name in ("csr", "csc", "bsr", "bsc")
        for make in [getattr(torch, f"sparse_{name}_tensor")]
        for way, see, device in (
            ("", lambda made: made.to_dense(), "cuda:0"),
            ("_values", lambda made: made.values(), "cuda:0"),
            ("_cpu", lambda made: made.cpu().to_dense(), "cpu"),
            ("_back", lambda made: made.cpu().cuda().to_dense(), "cuda:0"),
        )
    ),
    Row("compressed", lambda: compressed(torch.sparse_compressed_tensor, layout=torch.sparse_csr).to_dense()),
    Row("to_sparse", lambda: on_device().to_sparse().to_dense()),
    Row("to_sparse_csr", lambda: on_device().to_sparse_csr().values()),
    Row("sparse_grad", sparse_grad),
    Row("sparse_optimized", sparse_optimized),
    Row("sparse_buffer", lambda: Masked().cuda().mask.to_dense()),
    Row("sparse_deepcopy", lambda: copy.deepcopy(coo()).to_dense()),
    Row("sparse_save_and_load", lambda: loaded(coo()).to_dense()),
    Row("sparse_csr_save_and_load", lambda: loaded(compressed(torch.sparse_csr_tensor)).to_dense()),
    Row("sparse_load_on_cpu", lambda: loaded(coo(), map_location="cpu").to_dense(), "cpu"),
    Row("sparse_load_to_device", lambda: loaded(coo().cpu(), map_location="cuda").to_dense()),
]


def nested(device: Any = None, make: Any = torch.nested.nested_tensor, **options: Any) -> Any:
    """A nested tensor of parts on the device, or of others that are to go there."""
    parts = [on_cpu(), on_cpu()[:1]] if device else [on_device(), on_device()[:1]]
    return make(parts, device=device, **options)


def jagged(device: Any = None, **options: Any) -> Any:
    return nested(device, layout=torch.jagged, **options)


def jagged_grad() -> Any:
    tensor = jagged(requires_grad=True)
    (tensor * 2).values().sum().backward()
    return tensor.grad.values()


def attended() -> torch.Tensor:
    parts = [on_device()[None], on_device()[None, :1]]
    tensor = torch.nested.nested_tensor(parts, layout=torch.jagged)
    return torch.nn.functional.scaled_dot_product_attention(tensor, tensor, tensor).values()


def narrowed() -> torch.Tensor:
    starts, lengths = torch.tensor([0, 1], device="cuda"), torch.tensor([1, 2], device="cuda")
    return torch.nested.narrow(on_device(), 1, starts, lengths, layout=torch.jagged).unbind()[1]


as_nested = torch.nested.as_nested_tensor

NESTED = [
    Row("nested", lambda: nested().to_padded_tensor(0.0)),
    Row("nested_there", lambda: nested("cuda").to_padded_tensor(0.0)),
    Row("nested_number", lambda: nested(0).to_padded_tensor(0.0)),
    Row("nested_of_numbers", lambda: torch.nested.nested_tensor([[1.0], [2.0]], device="cuda")[1]),
    Row("as_nested", lambda: nested(make=as_nested)[1]),
    Row("as_nested_there", lambda: nested("cuda", make=as_nested)[1]),
    Row("as_nested_of_one", lambda: as_nested(on_device()).unbind()[1]),
    Row("nested_to", lambda: nested("cpu").to("cuda")[0]),
    Row("nested_cpu", lambda: nested().cpu()[0], "cpu"),
    Row("nested_sizes", lambda: nested()._nested_tensor_size(), "cpu"),
    Row("nested_save_and_load", lambda: loaded(nested())[1]),
    Row("jagged", lambda: jagged().to_padded_tensor(0.0)),
    Row("jagged_there", lambda: jagged("cuda").values()),
    Row("jagged_offsets", lambda: jagged("cuda").offsets()),
    Row("jagged_product", lambda: (jagged() * on_device()[1]).values()),
    Row("jagged_linear", lambda: torch.nn.functional.linear(jagged(), on_device()).values()),
    Row("jagged_as_nested", lambda: nested("cuda", make=as_nested, layout=torch.jagged).unbind()[1]),
    Row("jagged_of_one", lambda: as_nested(on_device()[None], layout=torch.jagged).values()),
    Row("jagged_to", lambda: jagged("cpu").to("cuda").values()),
    Row("jagged_cpu", lambda: jagged().cpu().values(), "cpu"),
    Row("jagged_half", lambda: jagged().half().values()),
    Row("jagged_grad", jagged_grad),
    Row("jagged_attention", attended),
    Row("jagged_narrow", narrowed),
    Row("jagged_deepcopy", lambda: copy.deepcopy(jagged()).values()),
    Row("jagged_save_and_load", lambda: loaded(jagged()).values()),
]


def quantised(tensor: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


def per_channel() -> torch.Tensor:
    scales, zeros = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
    return torch.quantize_per_channel(on_device(), scales, zeros, 0, torch.qint8)


QUANTISED = [
    Row("quantised", lambda: quantised(on_device()).dequantize()),
    Row("quantised_numbers", lambda: quantised(on_device()).int_repr()),
    Row("quantised_cpu", lambda: quantised(on_device()).cpu().dequantize(), "cpu"),
    Row("quantised_to", lambda: quantised(on_cpu()).to("cuda").dequantize()),
    Row("quantised_per_channel", lambda: per_channel().dequantize()),
    Row("quantised_empty", lambda: torch.empty_quantized([2], quantised(on_device())).dequantize() * 0),
    Row("quantised_save_and_load", lambda: loaded(quantised(on_device())).dequantize()),
    Row("quantised_load_to_device", lambda: loaded(quantised(on_cpu()), map_location="cuda").dequantize()),
    Row("marked_save_and_load", marked),
]

ROWS = [*SPARSE, *NESTED, *QUANTISED]
