import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.training.sums import Pair, Sums


class Operations(TorchDispatchMode):
    """Counts the operations that compute or copy; what only looks at a tensor otherwise is free."""

    FREE = ("view", "detach", "slice", "select", "unbind", "expand", "alias")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name not in self.FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def metrics(seed: int, count: int = 9) -> dict[str, Pair]:
    """Scalars and entries per label in turn, of magnitudes whose float32 sums would round."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (7,), (10,)]
    return {
        f"metric {i}": tuple(torch.rand(shapes[i % 3], generator=generator) * 10 ** (i % 5) for _ in range(2))
        for i in range(count)
    }


def test_sums_are_divided_once_not_averaged():
    sums = Sums.of({"loss": (torch.tensor(6.0), torch.tensor(2.0))})
    sums = sums.plus(Sums.of({"loss": (torch.tensor(1.0), torch.tensor(6.0))}))
    assert sums.averages() == {"loss": 7 / 8}  # the mean of 3 and 1/6 would be 1.58


def test_nothing_counted_is_none_label_by_label():
    accuracy = (torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2.0, 4.0, 0.0]))
    sums = Sums.of({"accuracy": accuracy, "loss": (torch.tensor(0.0), torch.tensor(0.0))})
    assert sums.averages() == {"accuracy": [0.5, 0.0, None], "loss": None}
    assert Sums().plus(sums).names == ("accuracy", "loss")
    assert Sums().averages() == {}


def test_together_they_are_what_each_pair_is_alone():
    """Bit for bit, in float64, whatever stands beside it; a step that is left out adds nothing, be it NaN."""
    steps = [metrics(seed) for seed in range(5)]
    steps[3]["metric 4"][0][2] = float("nan")
    counts = [True, True, False, False, True]
    window = Sums()
    alone: dict[str, list[torch.Tensor]] = {}
    for pairs, counted in zip(steps, counts, strict=True):
        window = window.plus(Sums.of(pairs).where(torch.tensor(counted)))
        for name, pair in pairs.items():
            before = alone.setdefault(name, [torch.zeros_like(side, dtype=torch.float64) for side in pair])
            for total, side in zip(before, pair, strict=True):
                total += side.double() if counted else 0.0
    for name, pair in alone.items():
        assert all(torch.equal(found, expected) for found, expected in zip(window[name], pair, strict=True)), name
    with pytest.raises(KeyError):
        window["metric"]


def test_a_pair_of_a_step_reaches_its_own_average_alone():
    before = Sums.of(metrics(1)).averages()
    changed = metrics(1)
    changed["metric 4"][0][2] += 1.0
    after = Sums.of(changed).averages()
    assert [name for name in before if before[name] != after[name]] == ["metric 4"]


def test_names_of_one_side_only_are_kept():
    """What an earlier version of a method left in a checkpoint is not lost, nor in the way."""
    one, other = metrics(1, 4), metrics(2, 6)
    del other["metric 2"]
    both = Sums.of(one).plus(Sums.of(other))
    assert both.names == ("metric 0", "metric 1", "metric 2", "metric 3", "metric 4", "metric 5")
    assert torch.equal(both["metric 2"][0], one["metric 2"][0].double())
    assert torch.equal(both["metric 1"][1], one["metric 1"][1].double() + other["metric 1"][1].double())
    assert torch.equal(both["metric 5"][1], other["metric 5"][1].double())


@pytest.mark.parametrize("count", [3, 24])
def test_a_step_costs_the_same_few_operations_for_any_number_of_metrics(count):
    window = Sums.of(metrics(0, count))
    pairs, finite = metrics(1, count), torch.tensor(True)
    with Operations() as operations:
        window.plus(Sums.of(pairs).where(finite))
    # Beside them a scalar zero, which a GPU's kernel takes as an argument.
    assert [name for name in operations.names if name != "scalar_tensor"] == ["cat", "_to_copy", "where", "add"]


def test_what_was_added_may_be_overwritten():
    """As a graph's outputs are by its next replay."""
    pairs = {"loss": (torch.rand((), dtype=torch.float64), torch.rand((), dtype=torch.float64))}
    sums = Sums.of(pairs)
    kept = float(sums["loss"][0])
    pairs["loss"][0].fill_(9.0)
    assert float(sums["loss"][0]) == kept


def test_state_goes_through_torch_save(tmp_path):
    sums = Sums.of(metrics(3))
    torch.save(sums.state_dict(), tmp_path / "sums.pt")
    state = torch.load(tmp_path / "sums.pt", weights_only=True)
    found = Sums.from_state(state, torch.device("cpu"))
    assert found.averages() == sums.averages()
    assert found.names == sums.names
    assert Sums.from_state(Sums().state_dict(), torch.device("cpu")).averages() == {}
