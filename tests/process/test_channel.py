"""A channel keeps messages whole and in order, and says when nobody is there any more."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from zerogpu.process import codec
from zerogpu.process.buffers import LARGE
from zerogpu.process.channel import Channel, ChannelClosed, pair
from zerogpu.process.messages import Event, Item, Raised, Ready, Result, Start


@pytest.fixture
def ends():
    channels = [Channel(sock) for sock in pair()]
    yield channels
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("size", [0, 1, LARGE - 100, LARGE - 1, LARGE, LARGE + 1, 10 * LARGE])
@pytest.mark.parametrize(
    "make",
    [
        Result,
        Item,
        lambda payload: Start(7, payload),
        lambda payload: Event(1, payload),
        lambda payload: Raised(payload, "E" * 2000),
    ],
    ids=["Result", "Item", "Start", "Event", "Raised"],
)
def test_payloads_around_the_limit_arrive_whole(ends, make, size: int) -> None:
    first, second = ends
    first.send_payload(make, codec.encode(b"x" * size, None, "it"))
    message = second.receive()
    assert codec.decode(message.payload) == b"x" * size
    assert type(message) is type(make(None))


def test_messages_of_all_sizes_keep_their_order(ends) -> None:
    first, second = ends
    sizes = [10, 5 * LARGE, 1, LARGE, 100, 3 * LARGE] * 20
    thread = threading.Thread(
        target=lambda: [
            first.send_payload(Item, codec.encode(np.full(n, i % 250, np.uint8), None, ""))
            for i, n in enumerate(sizes)
        ]
    )
    thread.start()
    for index, size in enumerate(sizes):
        array = codec.decode(second.receive().payload)
        assert array.nbytes == size
        assert not size or array[-1] == index % 250
    thread.join(30)


def test_many_threads_may_send(ends) -> None:
    first, second = ends

    def send(number: int) -> None:
        for index in range(50):
            value = (number, index, np.zeros(LARGE if index % 5 == 0 else 1))
            first.send_payload(Item, codec.encode(value, None, ""))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    got = [codec.decode(second.receive().payload)[:2] for _ in range(200)]
    for thread in threads:
        thread.join(30)
    for number in range(4):
        assert [index for n, index in got if n == number] == list(range(50))


def test_a_closed_end_is_noticed_by_sender_and_receiver(ends) -> None:
    first, second = ends
    second.close()
    with pytest.raises(ChannelClosed):
        first.receive()
    with pytest.raises(ChannelClosed):
        first.send(Ready(1))
    with pytest.raises(ChannelClosed):
        first.send_payload(Result, codec.encode(bytes(2 * LARGE), None, ""))


def test_what_was_sent_before_the_end_is_still_received(ends) -> None:
    first, second = ends
    first.send(Ready(5))
    first.close()
    assert second.receive() == Ready(5)
    with pytest.raises(ChannelClosed):
        second.receive()


def test_a_channel_that_was_used_and_closed_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        first, second = (Channel(sock) for sock in pair())
        first.send_payload(Result, codec.encode(bytes(3 * LARGE), None, ""))
        second.receive()
        first.close()
        second.close()
    assert len(os.listdir("/proc/self/fd")) == before
