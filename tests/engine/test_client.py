"""The router: tokens find their streams over row changes, endings and late arrivals."""

from __future__ import annotations

import random

import numpy as np

from headrace.engine.client import Router
from headrace.sched.plan import EOS, LENGTH
from headrace.sched.request import ABORTED, Bound, Ended, NewRequest, Publish

EMPTY = np.empty(0, np.int32)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def news(bound=(), rows=EMPTY, tokens=EMPTY, ended=()) -> Publish:
    return Publish(tuple(bound), rows, tokens, tuple(ended))


def request(handle: int) -> NewRequest:
    return NewRequest(handle, i32(1, 2), 100)


def test_watched_streams_are_handed_out_and_others_only_at_their_end() -> None:
    router = Router(4)
    quiet, watched = router.open(request(1), False), router.open(request(2), True)
    bound = [Bound(1, 0, 0, 0), Bound(2, 3, 0, 16)]
    assert router.receive(news(bound, i32(0, 3), i32(10, 20))) == [watched]
    assert router.take(watched) == [20] and watched.cached_tokens == 16
    assert router.receive(news(rows=i32(3, 0), tokens=i32(21, 11))) == [watched]
    ends = [Ended(1, EOS), Ended(2, LENGTH)]
    assert router.receive(news(rows=i32(0), tokens=i32(12), ended=ends)) == [quiet, watched]
    assert router.take(quiet) == [10, 11, 12] and router.take(watched) == [21]
    assert (quiet.finish_reason, watched.finish_reason) == ("stop", "length")


def test_a_request_may_change_its_row() -> None:
    router = Router(4)
    a, b = router.open(request(1), False), router.open(request(2), False)
    router.receive(news([Bound(1, 0, 0, 0)], i32(0), i32(10)))
    router.receive(news([Bound(2, 0, 1, 0), Bound(1, 2, 0, 0)], i32(0, 2), i32(20, 11)))
    router.receive(news(rows=i32(0, 2), tokens=i32(21, 12)))
    assert router.take(a) == [10, 11, 12] and router.take(b) == [20, 21]


def test_what_arrives_for_a_closed_stream_is_dropped() -> None:
    router = Router(2)
    stream = router.open(request(1), True)
    router.receive(news([Bound(1, 0, 0, 0)], i32(0), i32(10)))
    router.close(stream)
    router.close(stream)
    assert router.receive(news(rows=i32(0), tokens=i32(11), ended=[Ended(1, ABORTED)])) == []
    other = router.open(request(2), True)
    assert other.slot == stream.slot and len(router) == 1
    assert router.receive(news([Bound(1, 1, 0, 0)], i32(1), i32(5))) == [], (
        "an unknown request's row"
    )
    assert router.receive(news([Bound(2, 0, 1, 0)], i32(0), i32(12))) == [other]
    assert router.take(other) == [12]


def test_random_traffic_against_lists() -> None:
    rng = random.Random(0)
    router, rows = Router(8), dict.fromkeys(range(8))
    streams, expected, handle = {}, {}, 0
    for _ in range(3000):
        bound, ended, out = [], [], {}
        if rng.random() < 0.3:
            handle += 1
            streams[handle] = router.open(request(handle), rng.random() < 0.5)
            expected[handle] = []
        free = [row for row, owner in rows.items() if owner is None]
        waiting = [h for h in streams if h not in rows.values()]
        if free and waiting:
            row, owner = rng.choice(free), rng.choice(waiting)
            rows[row] = owner
            bound.append(Bound(owner, row, 0, 0))
        for row, owner in rows.items():
            if owner is not None and rng.random() < 0.8:
                out[row] = rng.randrange(1000)
                expected[owner].append(out[row])
        running = [h for h in rows.values() if h is not None]
        if running and rng.random() < 0.2:
            owner = rng.choice(running)
            rows = {row: None if h == owner else h for row, h in rows.items()}
            if rng.random() < 0.5:  # else preempted: it comes back on another row
                ended.append(Ended(owner, LENGTH))
        for stream in router.receive(news(bound, i32(*out), i32(*out.values()), ended)):
            if stream.finish_reason:
                got = stream.new.handle
                stream.taken = 0
                assert router.take(stream) == expected[got]
                router.close(stream)
                del streams[got]
    assert handle > 500
