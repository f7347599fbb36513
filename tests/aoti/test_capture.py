from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
import torch
from torch import nn

from zerogpu.aoti import aoti_capture
from zerogpu.errors import CaptureError


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, a, b=None, *, c=1, d=2):
        self.runs += 1
        return a

    def decode(self, z):
        self.runs += 1
        return z


def test_a_call_is_recorded_and_the_module_does_not_run():
    module, x = Two(), torch.ones(2)
    with aoti_capture(module) as call:
        module(x, d=3, c=4)
        pytest.fail("the block goes on after the call")
    assert call.args == (x,)
    assert list(call.kwargs.items()) == [("c", 4), ("d", 3)]
    assert module.runs == 0
    assert "forward" not in vars(module)


def test_another_method_can_be_captured():
    module = Two()
    with aoti_capture(module, "decode") as call:
        module.decode(5)
    assert call.args == (5,)
    assert "decode" not in vars(module)


def test_a_pipeline_that_catches_exception_is_captured_all_the_same():
    module, went_on = Two(), []
    with aoti_capture(module) as call:
        try:
            module(1)
        except Exception:  # noqa: BLE001 - what a pipeline does
            went_on.append("caught")
        went_on.append("next step")
    assert call.args == (1,)
    assert went_on == []


def test_a_pipeline_that_catches_everything_is_captured_all_the_same():
    module = Two()
    with aoti_capture(module) as call:
        try:
            module(1)
        except BaseException as error:
            raise RuntimeError("the pipeline failed") from error
    assert call.args == (1,)


def test_with_several_calls_all_but_the_last_run():
    module = Two()
    with aoti_capture(module, calls=3) as call:
        for i in range(10):
            module(i)
    assert [args for args, _ in call.calls] == [(0,), (1,), (2,)]
    assert call.args == (2,)
    assert module.runs == 2


def test_a_block_that_never_calls_the_module_says_what_to_do():
    module = Two()
    with pytest.raises(CaptureError, match="never called") as caught, aoti_capture(module):
        pass
    assert "Run something in the block that calls this very module" in str(caught.value)
    assert "forward" not in vars(module)


def test_too_few_calls_are_an_error():
    module = Two()
    with pytest.raises(CaptureError, match="1 of 2 times"), aoti_capture(module, calls=2):
        module(1)


def test_an_error_of_the_block_is_its_own_and_the_module_is_restored():
    module = Two()
    with pytest.raises(ZeroDivisionError), aoti_capture(module):
        1 / 0  # noqa: B018
    assert "forward" not in vars(module)


def test_an_error_after_a_swallowed_stop_is_not_swallowed():
    module = Two()
    with pytest.raises(ZeroDivisionError), aoti_capture(module):
        with contextlib.suppress(BaseException):
            module(1)
        1 / 0  # noqa: B018


def test_calls_from_other_threads_run_and_are_not_recorded():
    module, results = Two(), []
    with aoti_capture(module) as call:
        thread = threading.Thread(target=lambda: results.append(module("other")))
        thread.start()
        thread.join()
        module("mine")
    assert results == ["other"]
    assert call.args == ("mine",)


def test_a_call_only_from_another_thread_is_named_as_the_reason():
    module = Two()
    with pytest.raises(CaptureError, match="only from another thread"), aoti_capture(module):
        thread = threading.Thread(target=module, args=(1,))
        thread.start()
        thread.join()


def test_a_call_through_to_thread_is_recorded():
    module = Two()
    with aoti_capture(module) as call:
        asyncio.run(asyncio.to_thread(module, 1))
    assert call.args == (1,)


def test_two_captures_of_one_module_at_once_do_not_disturb_each_other():
    module, barrier, captured = Two(), threading.Barrier(2), {}

    def capture(name):
        with aoti_capture(module) as call:
            barrier.wait(10)
            module(name)
        captured[name] = call.args

    threads = [threading.Thread(target=capture, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert captured == {"a": ("a",), "b": ("b",)}
    assert "forward" not in vars(module)


def test_a_method_replaced_on_the_instance_comes_back():
    module = Two()
    hook = module.forward = lambda *args, **kwargs: "hooked"
    with aoti_capture(module):
        module(1)
    assert vars(module)["forward"] is hook


def test_tensors_of_inference_mode_can_be_exported():
    module = nn.Linear(3, 3)
    with torch.inference_mode(), aoti_capture(module) as call:
        module(torch.ones(2, 3))
    assert not call.args[0].is_inference()
    torch.export.export(module, call.args, call.kwargs)
