"""The queue is first come, first served, gives no slot twice, and leaves none idle while a call waits."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from zerogpu import GPUCancelled, QueueFullError, QueueTimeoutError
from zerogpu.config import Settings
from zerogpu.options import Options
from zerogpu.process.call import Call
from zerogpu.process.messages import Encoded
from zerogpu.scheduling.scheduler import Lease, Scheduler
from zerogpu.task import Kind, Task


def function() -> None:
    """What the calls call; it never runs."""


TASK = Task(function, Kind.PLAIN, "function", Options())


def call() -> Call:
    return Call(task=TASK, seconds=1, grace=1, payload=Encoded(b""))


@dataclass(eq=False)
class Worker:
    """Stands for a warm worker."""

    idle_since: float = 0.0


def slots(count: int, **more: Any) -> Scheduler:
    return Scheduler(Settings(slots=count, **more))


def result(future: Future[Lease]) -> Lease:
    return future.result(10)


def test_a_free_slot_is_leased_at_once() -> None:
    scheduler = slots(2)
    first, second = scheduler.acquire(call()), scheduler.acquire(call())
    assert first.slot is not second.slot
    assert scheduler.waiting() == 0


def test_waiters_get_slots_in_the_order_in_which_they_came() -> None:
    scheduler = slots(1)
    lease = scheduler.acquire(call())
    calls = [call() for _ in range(5)]
    futures = [scheduler.request(each) for each in calls]
    assert [scheduler.position(each) for each in calls] == [0, 1, 2, 3, 4]
    for index, future in enumerate(futures):
        assert [f.done() for f in futures] == [i < index for i in range(5)]
        scheduler.release(lease)
        lease = result(future)
        assert lease.call is calls[index]


def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    scheduler = slots(1)
    lease = scheduler.acquire(call())
    waiting = scheduler.request(call())
    scheduler.release(lease)
    late = scheduler.request(call())
    assert waiting.done()
    assert not late.done()


def test_the_slot_with_the_warmest_worker_is_preferred() -> None:
    scheduler = slots(3)
    leases = [scheduler.acquire(call()) for _ in range(3)]
    leases[1].slot.worker = Worker()
    for lease in leases:
        scheduler.release(lease)
    assert scheduler.acquire(call()).slot is leases[1].slot


def test_a_cancelled_waiter_leaves_the_queue_and_takes_no_slot() -> None:
    scheduler = slots(1)
    lease = scheduler.acquire(call())
    first, second = call(), call()
    cancelled, next_one = scheduler.request(first), scheduler.request(second)
    first.cancel()
    with pytest.raises(GPUCancelled):
        cancelled.result(10)
    assert scheduler.position(second) == 0
    scheduler.release(lease)
    assert result(next_one).call is second


def test_a_call_cancelled_before_it_asks_is_refused_without_a_slot() -> None:
    scheduler = slots(1)
    lease = scheduler.acquire(call())
    gone = call()
    gone.cancel()
    with pytest.raises(GPUCancelled):
        scheduler.acquire(gone)
    scheduler.release(lease)
    assert scheduler.acquire(call())


def test_a_cancel_wakes_a_thread_that_waits() -> None:
    scheduler = slots(1)
    scheduler.acquire(call())
    waiting, errors = call(), []

    def wait() -> None:
        try:
            scheduler.acquire(waiting)
        except GPUCancelled as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    limit = time.monotonic() + 10
    while scheduler.position(waiting) is None and time.monotonic() < limit:
        time.sleep(0.001)
    waiting.cancel()
    thread.join(10)
    assert len(errors) == 1


def test_withdrawing_a_granted_request_gives_its_slot_back() -> None:
    scheduler = slots(1)
    lease = scheduler.acquire(call())
    abandoned, next_one = scheduler.request(call()), scheduler.request(call())
    scheduler.release(lease)
    assert abandoned.done()
    scheduler.withdraw(abandoned)
    assert next_one.done()


def test_withdrawing_a_waiting_request_takes_it_out_of_the_queue() -> None:
    scheduler = slots(1)
    lease = scheduler.acquire(call())
    abandoned, next_one = scheduler.request(call()), scheduler.request(call())
    scheduler.withdraw(abandoned)
    assert scheduler.waiting() == 1
    scheduler.release(lease)
    assert next_one.done()


def test_withdraw_and_grant_at_the_same_moment_lose_no_slot() -> None:
    for _ in range(300):
        scheduler = slots(1)
        lease = scheduler.acquire(call())
        future = scheduler.request(call())
        threads = [
            threading.Thread(target=scheduler.withdraw, args=(future,)),
            threading.Thread(target=scheduler.release, args=(lease,)),
        ]
        random.shuffle(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(scheduler._free) == 1


def test_cancel_and_grant_at_the_same_moment_lose_no_slot() -> None:
    for _ in range(300):
        scheduler = slots(1)
        lease = scheduler.acquire(call())
        waiting = call()
        future = scheduler.request(waiting)
        threads = [
            threading.Thread(target=waiting.cancel),
            threading.Thread(target=scheduler.release, args=(lease,)),
        ]
        random.shuffle(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        if future.exception(10) is None:
            scheduler.release(future.result())
        assert len(scheduler._free) == 1
        assert scheduler.waiting() == 0


def test_a_full_queue_refuses_with_its_number_and_the_setting() -> None:
    scheduler = slots(1, max_queue=2)
    scheduler.acquire(call())
    for _ in range(2):
        scheduler.request(call())
    with pytest.raises(QueueFullError, match=r"2 calls wait.*no more than 2 may.*ZEROGPU_MAX_QUEUE"):
        scheduler.acquire(call())
    with pytest.raises(QueueFullError):
        scheduler.request(call())
    assert scheduler.waiting() == 2


def test_a_limited_queue_lets_calls_in_while_slots_are_free() -> None:
    scheduler = slots(3, max_queue=1)
    assert len({scheduler.acquire(call()).slot.index for _ in range(3)}) == 3


def test_a_call_waits_no_longer_than_the_setting_says() -> None:
    scheduler = slots(1, queue_timeout=0.1)
    lease = scheduler.acquire(call())
    with pytest.raises(QueueTimeoutError, match=r"ZEROGPU_QUEUE_TIMEOUT is 0\.1 s"):
        scheduler.acquire(call())
    assert scheduler.waiting() == 0
    scheduler.release(lease)
    assert scheduler.acquire(call())


def test_only_workers_idle_for_long_are_taken() -> None:
    scheduler = slots(3)
    leases = [scheduler.acquire(call()) for _ in range(3)]
    workers = [Worker(1.0), Worker(5.0), Worker(1.0)]
    for lease, worker in zip(leases, workers, strict=True):
        lease.slot.worker = worker
    for lease in leases[:2]:
        scheduler.release(lease)
    assert scheduler.take_idle_workers(2.0) == [workers[0]]
    assert leases[0].slot.worker is None
    assert leases[2].slot.worker is workers[2]  # its call still runs


def test_a_thousand_calls_from_many_threads_never_share_a_slot() -> None:
    scheduler = slots(3)
    busy: set[int] = set()
    lock = threading.Lock()

    def run(_: int) -> int:
        lease = scheduler.acquire(call())
        with lock:
            assert lease.slot.index not in busy
            busy.add(lease.slot.index)
        with lock:
            busy.remove(lease.slot.index)
        scheduler.release(lease)
        return 1

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(run, range(1000))) == 1000
    assert len(scheduler._free) == 3


class Queue(RuleBasedStateMachine):
    """Any history of requests, releases, cancels and withdrawals, against the rules."""

    granted = Bundle("granted")
    requested = Bundle("requested")

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = slots(self.count)
        self.order: list[tuple[Call, Future[Lease]]] = []
        self.out: list[Lease] = []

    count = 2

    @rule(target=requested)
    def request(self) -> tuple[Call, Future[Lease]]:
        each = call()
        pair = (each, self.scheduler.request(each))
        self.order.append(pair)
        return pair

    @rule(target=granted, pair=consumes(requested))
    def take(self, pair: tuple[Call, Future[Lease]]) -> Any:
        each, future = pair
        if future.done() and not future.cancelled() and future.exception() is None:
            lease = future.result()
            assert lease.call is each
            self.out.append(lease)
            self.order.remove(pair)
            return lease
        return multiple()

    @rule(lease=consumes(granted), warm=st.booleans())
    def release(self, lease: Lease, warm: bool) -> None:
        lease.slot.worker = Worker() if warm else None
        self.out.remove(lease)
        self.scheduler.release(lease)

    @rule(pair=requested)
    def cancel(self, pair: tuple[Call, Future[Lease]]) -> None:
        waited = not pair[1].done()
        pair[0].cancel()
        if waited:
            assert isinstance(pair[1].exception(10), GPUCancelled)
            self.order.remove(pair)

    @rule(pair=consumes(requested))
    def withdraw(self, pair: tuple[Call, Future[Lease]]) -> None:
        self.scheduler.withdraw(pair[1])
        if pair in self.order:
            self.order.remove(pair)

    @rule()
    def reap(self) -> None:
        self.scheduler.take_idle_workers(time.monotonic())

    def _held(self) -> list[Lease]:
        held = list(self.out)
        for _, future in self.order:
            try:
                if future.done() and future.exception() is None:
                    held.append(future.result())
            except CancelledError:
                continue
        return held

    @invariant()
    def no_slot_is_held_twice_or_lost(self) -> None:
        indices = [lease.slot.index for lease in self._held()]
        assert len(indices) == len(set(indices))
        assert len(indices) + len(self.scheduler._free) == self.count

    @invariant()
    def no_slot_is_idle_while_a_call_waits(self) -> None:
        assert not (self.scheduler._free and self.scheduler.waiting())

    @invariant()
    def those_who_wait_are_the_last_to_come(self) -> None:
        waits = [not future.done() for _, future in self.order]
        assert waits == sorted(waits)
        positions = [
            self.scheduler.position(each) for (each, _), w in zip(self.order, waits, strict=True) if w
        ]
        assert positions == list(range(len(positions)))


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
