import os
import signal
import time

import pytest

from draftsmith.training.interruption import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_and_a_later_one_acts(number):
    """One that follows at once is the first again: torchrun passes on what all processes have got already."""
    before = signal.getsignal(number)
    seen = []
    signal.signal(number, lambda *_: seen.append("second"))
    try:
        with StopRequest(relayed_within=0.2) as request:
            assert request.signal_name is None
            os.kill(os.getpid(), number)
            assert request.signal_name == signal.Signals(number).name
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == []
            time.sleep(0.25)
            os.kill(os.getpid(), number)
            assert seen == ["second"]
    finally:
        signal.signal(number, before)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
