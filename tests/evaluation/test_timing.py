import time

from unmask.evaluation.timing import best_seconds


def test_calls_take_turns_and_the_shortest_time_counts():
    order, pauses = [], iter([0.05, 0.0, 0.05])

    def slow_at_first():
        order.append("a")
        time.sleep(next(pauses))

    seconds = best_seconds({"a": slow_at_first, "b": lambda: order.append("b")})
    assert order == ["a", "b"] * 3
    assert 0 <= seconds["a"] < 0.05
    assert 0 <= seconds["b"] < 0.05
