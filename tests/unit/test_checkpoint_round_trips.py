"""What a module's state_dict can hold beside weights, saved and restored as torch.save and load_state_dict would."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchstrat as ts


class Versioned(nn.Linear):
    """Halves what versions before 2 have saved."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version") != 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Growing(nn.Module):
    """Its extra state is a tensor that grows."""

    def __init__(self, values):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.values = torch.tensor(values)

    def get_extra_state(self):
        return self.values

    def set_extra_state(self, state):
        self.values = state


def make(kind):
    return getattr(ts, kind)(["cpu:0", "cpu:1"])


@pytest.mark.parametrize("kind", ["MirroredStrategy", "CentralStorageStrategy"])
def test_versions_of_modules_are_kept(kind, tmp_path):
    strategy = make(kind)
    with strategy.scope():
        saved, restored = Versioned(2, 2), Versioned(2, 2)
    ts.Checkpoint(model=saved).save(tmp_path / "saved")
    ts.Checkpoint(model=restored).restore(tmp_path / "saved")
    strategy.close()
    assert torch.equal(saved.weight, restored.weight)


def test_versions_are_in_a_consolidated_file(tmp_path):
    model = Versioned(2, 2)
    ts.Checkpoint(model=model).save(tmp_path / "saved")
    ts.consolidate(tmp_path / "saved", tmp_path / "plain.pt")
    plain, restored = Versioned(2, 2), Versioned(2, 2)
    plain.load_state_dict(torch.load(tmp_path / "plain.pt", weights_only=True)["model"])
    ts.Checkpoint(model=restored).restore(tmp_path / "plain.pt")
    assert torch.equal(model.weight, plain.weight)
    assert torch.equal(model.weight, restored.weight)


@pytest.mark.parametrize("kind", ["MirroredStrategy", "CentralStorageStrategy"])
def test_extra_state_may_grow(kind, tmp_path):
    strategy = make(kind)
    with strategy.scope():
        saved, restored = Growing([1, 2, 3]), Growing([])
    ts.Checkpoint(model=saved).save(tmp_path / "saved")
    ts.Checkpoint(model=restored).restore(tmp_path / "saved")
    strategy.close()
    assert restored.values.tolist() == [1, 2, 3]


def test_one_name_is_enough_for_a_tied_weight(tmp_path):
    def tied():
        model = nn.ModuleDict({"first": nn.Linear(3, 3, bias=False), "last": nn.Linear(3, 3, bias=False)})
        model["last"].weight = model["first"].weight
        return model

    model, restored = tied(), tied()
    torch.save({"model": {"first.weight": model["first"].weight.detach()}}, tmp_path / "plain.pt")
    ts.Checkpoint(model=restored).restore(tmp_path / "plain.pt")
    assert torch.equal(restored["last"].weight, model["first"].weight)
