"""Changes of weights after going live are noticed once, by name."""

from __future__ import annotations

import sys
import warnings

import pytest

from zerogpu import gpu, refresh
from zerogpu.process.snapshot import Snapshot
from zerogpu.process.weights import WeightWatch

torch = pytest.importorskip("torch")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.scale = 1.0
        self.shape = (1, 2)
        self._cached = 0


CHANGES = {
    "in place": (lambda n: n.layer.weight.add_(1), "'weight' of Net.layer"),
    "data": (lambda n: setattr(n.layer.bias, "data", torch.ones(2)), "'bias' of Net.layer"),
    "new parameter": (lambda n: setattr(n.layer, "weight", torch.nn.Parameter(torch.ones(2, 2))), "'weight'"),
    "load_state_dict": (lambda n: n.load_state_dict(Net().state_dict()), "of Net.layer"),
    "buffer": (lambda n: n.norm.running_mean.add_(1), "'running_mean' of Net.norm"),
    "new module": (lambda n: setattr(n, "adapter", torch.nn.Linear(1, 1)), "'adapter' of Net"),
    "eval": (lambda n: n.eval(), "'training' of "),
    "plain attribute": (lambda n: setattr(n, "scale", 3), "'scale' of Net"),
    "tuple attribute": (lambda n: setattr(n, "shape", (1, 3)), "'shape' of Net"),
    "new attribute": (lambda n: setattr(n, "name", "a"), "'name' of Net"),
    "removed attribute": (lambda n: delattr(n, "scale"), "'scale' of Net"),
    "removed module": (lambda n: delattr(n, "norm"), "'norm' of Net"),
    "replaced module": (lambda n: setattr(n, "layer", torch.nn.Linear(2, 2)), "'layer' of Net"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_is_noticed_once_and_named(how: str) -> None:
    net = Net()
    watch = WeightWatch(Snapshot())
    assert watch._look() is None
    change, text = CHANGES[how]
    with torch.no_grad():
        change(net)
    found = watch._look()
    assert found is not None
    assert text in found
    while watch._look():  # load_state_dict changes several
        pass
    assert watch._look() is None


def test_a_lazy_module_changes_when_it_gets_its_shape() -> None:
    module = torch.nn.LazyLinear(2)
    watch = WeightWatch(Snapshot())
    assert watch._look() is None
    module(torch.ones(3, 2))
    assert watch._look() is not None


def test_using_a_module_is_no_change() -> None:
    net = Net().eval()
    watch = WeightWatch(Snapshot())
    net.norm(net.layer(torch.ones(3, 2))).sum().backward()
    net.requires_grad_(False)
    net.eval()
    net._cached = 1
    net.scale = float("1")
    assert watch._look() is None


def test_a_module_made_later_or_deleted_is_no_change() -> None:
    net = Net()
    watch = WeightWatch(Snapshot())
    later = Net()
    with torch.no_grad():
        later.layer.weight.add_(1)
    del net
    assert watch._look() is None


def test_looks_cost_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = WeightWatch(Snapshot())
    looks = []
    monkeypatch.setattr(watch, "_look", lambda: looks.append(1))
    now = [100.0]

    def clock() -> float:
        now[0] += 0.1  # each reading of the clock: a look "takes" this long
        return now[0]

    monkeypatch.setattr("zerogpu.process.weights.time.monotonic", clock)
    monkeypatch.setattr("zerogpu.process.weights.time.thread_time", clock)
    for _ in range(40):
        watch.change()
    assert len(looks) == 1
    now[0] += 60
    watch.change()
    assert len(looks) == 2


def test_a_call_after_a_change_warns_once_until_refresh(app) -> None:
    net = Net()
    read = gpu(lambda: net.layer.weight.sum().item())
    with torch.no_grad():
        net.layer.weight.zero_()
    app()
    assert read() == 0
    with torch.no_grad():
        net.layer.weight.fill_(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from zerogpu.runtime import runtime

        runtime._live.app.snapshot.watch._next = 0  # do not wait for the next look
        assert read() == 0
        assert read() == 0
    texts = [str(w.message) for w in caught if "was changed in the main process" in str(w.message)]
    assert len(texts) == 1
    assert "'weight' of Net.layer" in texts[0]
    assert "zerogpu.refresh()" in texts[0]
    refresh()
    assert read() == 4


def test_a_tensor_in_a_global_of_the_app_is_watched(monkeypatch) -> None:
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "SCALE", torch.ones(3), raising=False)
    watch = WeightWatch(Snapshot())
    assert watch.change() is None
    module.SCALE.fill_(2)
    watch._next = 0
    assert watch.change() == "the tensor 'SCALE'"


def test_a_change_is_named_by_its_path() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    watch = WeightWatch(Snapshot())
    model[0][0].weight.data = torch.zeros(2, 2)
    assert watch.change() == "'weight' of Sequential.0.0"


def test_a_model_that_a_worker_trained_comes_back_trained(app) -> None:
    model = torch.nn.Linear(300, 300)
    box = Box(model)

    @gpu
    def untouched() -> object:
        return model

    @gpu
    def trained(boxed: bool) -> object:
        with torch.no_grad():
            model.weight.zero_()
        return box if boxed else model

    app(isolation="call")
    assert untouched() is model
    assert trained(False).weight.abs().sum() == 0
    assert trained(True).model.weight.abs().sum() == 0
    assert model.weight.abs().sum() > 0


class Box:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model


late: torch.nn.Module | None = None


def test_a_model_that_a_global_came_to_hold_is_warned_of_once(app) -> None:
    global late
    late = None

    @gpu
    def use() -> bool:
        return late is None

    app()
    assert use()
    late = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="uses 'late', which was set in the main process after"):
        assert use()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert use()
        refresh()
        assert not use()
    late = None


def test_a_lazy_proxy_in_a_global_is_not_asked_anything(app, monkeypatch) -> None:
    asked: list[str] = []

    class Proxy:
        def __getattribute__(self, name: str) -> object:
            asked.append(name)
            return object.__getattribute__(self, name)

    monkeypatch.setitem(globals(), "proxy", Proxy())

    @gpu
    def use() -> int:
        return 0 if proxy is None else 1  # noqa: F821 - a global that is there while the test runs

    app()
    asked.clear()
    assert use() == 1
    assert asked == []
