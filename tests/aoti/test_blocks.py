"""Repeated blocks: what is compiled once, and which of them are the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zerogpu.aoti.blocks import find_blocks, targets_of
from zerogpu.aoti.fingerprint import Description, fingerprint


class Layer(nn.Module):
    def __init__(self, size: int = 8, index: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Model(nn.Module):
    def __init__(self, layers: int = 4, head: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(8, head)


def test_equal_items_of_a_list_are_one_target() -> None:
    assert find_blocks(Model(3)) == [["layers.0", "layers.1", "layers.2"]]


def test_items_of_several_forms_are_several_targets() -> None:
    model = Model(2)
    model.layers.extend([Layer(4), Layer(4)])
    assert find_blocks(model) == [["layers.0", "layers.1"], ["layers.2", "layers.3"]]


def test_lists_inside_items_that_are_alone_are_found() -> None:
    model = nn.ModuleDict({"encoder": nn.Sequential(Model(2), nn.ReLU())})
    assert find_blocks(model) == [["encoder.0.layers.0", "encoder.0.layers.1"]]


def test_blocks_inside_blocks_are_not_looked_for() -> None:
    model = nn.ModuleList([Model(2), Model(2)])
    assert find_blocks(nn.ModuleDict({"a": model})) == [["a.0", "a.1"]]


def test_names_in_the_models_own_code_come_first() -> None:
    model = Model(2)
    model._repeated_blocks = ["Linear"]
    assert find_blocks(model) == [["layers.0.linear", "layers.1.linear"], ["head"]]


def test_a_model_that_is_mostly_something_else_is_compiled_as_a_whole() -> None:
    assert targets_of(Model(4, head=2), "auto") == find_blocks(Model(4))
    assert targets_of(Model(2, head=100), "auto") == [[""]]
    assert targets_of(nn.Linear(2, 2), "auto") == [[""]]
    assert targets_of(nn.ReLU(), "auto") == [[""]]


@pytest.mark.parametrize("blocks", [None, False])
def test_without_blocks_it_is_the_module(blocks: object) -> None:
    assert targets_of(Model(), blocks) == [[""]]


def test_blocks_by_class_name() -> None:
    assert targets_of(Model(2), ["Layer"]) == [["layers.0", "layers.1"]]
    assert targets_of(Model(2), "Layer") == [["layers.0", "layers.1"]]
    with pytest.raises(ValueError, match=r"Lair.*Layer, Linear, Model"):
        targets_of(Model(2), ["Lair"])


class TestFingerprint:
    def test_values_of_weights_do_not_count(self) -> None:
        assert fingerprint(Layer()) == fingerprint(Layer())

    @pytest.mark.parametrize(
        "change",
        [
            lambda layer: setattr(layer, "index", 1),
            lambda layer: layer.eval(),
            lambda layer: layer.double(),
            lambda layer: setattr(layer, "linear", nn.Linear(8, 8, bias=False)),
            lambda layer: setattr(layer, "sizes", [1, (2, {"a": 3})]),
            lambda layer: layer.register_forward_hook(print),
            lambda layer: layer.linear.register_buffer("table", torch.ones(2)),
            lambda layer: setattr(layer.linear, "bias", nn.Parameter(torch.ones(8, 2)[:, 0])),
        ],
    )
    @pytest.mark.parametrize("portable", [False, True])
    def test_what_tracing_sees_counts(self, change, portable: bool) -> None:
        before, changed = Layer(), Layer()
        change(changed)
        assert fingerprint(before, portable=portable) != fingerprint(changed, portable=portable)

    def test_ties_count(self) -> None:
        tied, loose = nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer(), Layer()])
        tied[1].linear.weight = tied[0].linear.weight
        assert fingerprint(tied) != fingerprint(loose)

    def test_objects_are_told_apart_by_what_they_hold(self) -> None:
        class Config:
            def __init__(self, size: int) -> None:
                self.size = size

        def layer(size: int) -> Layer:
            made = Layer()
            made.config = Config(size)
            return made

        assert fingerprint(layer(1)) == fingerprint(layer(1))
        assert fingerprint(layer(1)) != fingerprint(layer(2))

    def test_functions_are_told_apart_by_their_code_in_other_processes(self) -> None:
        def layer(function) -> Layer:
            made = Layer()
            made.activation = function
            return made

        same, equal, other = (layer(lambda x: x + 1), layer(lambda x: x + 1), layer(lambda x: x.relu()))
        assert fingerprint(same) != fingerprint(equal)
        assert fingerprint(same, portable=True) == fingerprint(equal, portable=True)
        assert fingerprint(same, portable=True) != fingerprint(other, portable=True)

    def test_examples_are_told_apart_by_their_numbers_wherever_these_are(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def around(size: int):
            return lambda: size

        keys = [
            *(Description(portable=True)(example) for example in (lambda: 4, lambda: 9)),
            *(Description(portable=True)(around(size)) for size in (4, 9)),
            *(Description(portable=True)(lambda size=size: size) for size in (4, 9)),
        ]
        for size in (4, 9):  # as if it came from the environment
            monkeypatch.setitem(globals(), "SIZE", size)
            keys.append(Description(portable=True)(lambda: [SIZE for _ in range(2)]))  # noqa: F821
        assert len({repr(key) for key in keys}) == len(keys)
        assert Description(portable=True)(around(4)) == Description(portable=True)(around(4))
