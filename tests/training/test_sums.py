import torch

from draftsmith.training.sums import Sums


def test_sums_are_divided_once_not_averaged():
    sums = Sums()
    sums.add("loss", torch.tensor(6.0), torch.tensor(2.0))
    sums.add("loss", torch.tensor(1.0), torch.tensor(6.0))
    assert sums.averages() == {"loss": 7 / 8}  # the mean of 3 and 1/6 would be 1.58


def test_nothing_counted_is_none_label_by_label():
    sums = Sums()
    sums.add("accuracy", torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2.0, 4.0, 0.0]))
    sums.add("loss", torch.tensor(0.0), torch.tensor(0.0))
    assert sums.averages() == {"accuracy": [0.5, 0.0, None], "loss": None}
    sums.add("accuracy", torch.zeros(3), torch.zeros(3))
    assert sums.names == ("accuracy", "loss")


def test_state_goes_through_torch_save(tmp_path):
    sums = Sums()
    sums.add("accuracy", torch.rand(3), torch.rand(3))
    sums.add("loss", torch.rand(()), torch.rand(()))
    torch.save(sums.state_dict(), tmp_path / "sums.pt")
    state = torch.load(tmp_path / "sums.pt", weights_only=True)
    assert Sums.from_state(state, torch.device("cpu")).averages() == sums.averages()
