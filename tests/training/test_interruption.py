import os
import signal

import pytest

from draftsmith.training.interruption import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_and_the_second_acts(number):
    before = signal.getsignal(number)
    seen = []
    signal.signal(number, lambda *_: seen.append("second"))
    try:
        with StopRequest() as request:
            assert request.signal_name is None
            os.kill(os.getpid(), number)
            assert request.signal_name == signal.Signals(number).name
            assert seen == []
            os.kill(os.getpid(), number)
            assert seen == ["second"]
    finally:
        signal.signal(number, before)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
