"""Partitions are the model's own layers, in order, under their own names."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe_lite.partition import SharedParameter, check_model, layer_names, partition, shared_parameters


def chain(length):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(length)))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_partitions_are_the_model(balance):
    """The same layer objects in the same order, under the same state_dict keys, computing the same."""
    model = chain(sum(balance))
    partitions = partition(model, balance)
    assert [len(stage) for stage in partitions] == balance
    assert [id(layer) for stage in partitions for layer in stage] == [id(layer) for layer in model]
    assert [key for stage in partitions for key in stage.state_dict()] == list(model.state_dict())
    x = y = torch.ones(3, 2)
    for stage in partitions:
        y = stage(y)
    assert torch.equal(y, model(x))


def test_layers_keep_the_names_that_the_user_gave():
    """A state_dict's keys start with them."""
    model = nn.Sequential(OrderedDict(body=nn.Linear(2, 2), act=nn.ReLU(), head=nn.Linear(2, 1)))
    assert layer_names(partition(model, (2, 1))) == [["body", "act"], ["head"]]


def test_cutting_leaves_the_model_as_it_was():
    """Names, modes and number of layers: nothing is moved out of the model."""
    model = chain(3).eval()
    model[1].train()
    partitions = partition(model, [1, 2])
    assert len(model) == 3
    assert [layer.training for layer in model] == [False, True, False]
    assert not any(stage.training for stage in partitions)


def test_a_nested_sequential_is_one_layer():
    """Only the outermost chain is cut."""
    assert [len(stage) for stage in partition(nn.Sequential(chain(3), chain(2)), [1, 1])] == [1, 1]


class Residual(nn.Sequential):
    """A Sequential that does more than its layers do."""

    def forward(self, x):
        return x + super().forward(x)


class Named(nn.Sequential):
    """A Sequential by another name."""


def test_a_subclass_that_is_a_chain_can_be_cut():
    """What counts is the forward method."""
    check_model(Named(nn.ReLU()))


def owning(change):
    """A model that has something of its own beside its layers."""
    model = nn.Sequential(nn.Linear(2, 2))
    change(model)
    return model


@pytest.mark.parametrize(
    ("module", "error", "words"),
    [
        (nn.Linear(2, 2), TypeError, "this is a Linear: write it as nn.Sequential"),
        ([nn.Linear(2, 2)], TypeError, "this is a list"),
        (
            Residual(nn.Linear(2, 2)),
            TypeError,
            "Residual is an nn.Sequential with a forward method of its own",
        ),
        (nn.Sequential(), ValueError, "0 layers"),
        (owning(lambda m: setattr(m, "forward", lambda x: x)), TypeError, "with a forward method of its own"),
        (
            owning(lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1)))),
            ValueError,
            "the nn.Sequential itself has parameters, scale, which no stage would hold: give them to a layer",
        ),
        (nn.Sequential(nn.LazyBatchNorm1d()), ValueError, "layer '0' is a LazyBatchNorm1d that does not know its size"),
        (owning(lambda m: m.register_buffer("mask", torch.ones(1))), ValueError, "itself has buffers, mask"),
        (owning(lambda m: m.register_forward_hook(print)), ValueError, "hooks on the nn.Sequential itself"),
        (owning(lambda m: m.register_full_backward_hook(print)), ValueError, "hooks on the nn.Sequential itself"),
    ],
)
def test_a_model_that_is_no_chain_of_layers_is_refused(module, error, words):
    """The error says what was given and what to write."""
    with pytest.raises(error, match=words):
        partition(module, [1])


def test_the_same_layer_twice_is_refused():
    """It would have one state and two places; the error names both."""
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="layers 0 and 2 are one Linear object"):
        partition(nn.Sequential(layer, nn.ReLU(), layer), [2, 1])


@pytest.mark.parametrize(
    ("balance", "error", "words"),
    [
        ([2, 2], ValueError, r"\[2, 2\] covers 4 layers, the model has 5: add 1 to one entry"),
        ([5, 0], ValueError, "stage 1 0 layers"),
        ([2.5, 2.5], TypeError, r"stage 0 2\.5 layers"),
        (5, TypeError, "a sequence"),
    ],
)
def test_a_balance_that_does_not_fit_is_refused(balance, error, words):
    """As check_balance says."""
    with pytest.raises(error, match=words):
        partition(chain(5), balance)


def test_parameters_that_stages_share_are_listed():
    """Each with all its names in the model and the stages that use it, in order of first use."""
    model = chain(4)
    model[3].weight = model[0].weight
    model[2].bias = model[1].bias = model[0].bias
    assert shared_parameters(partition(model, [2, 2])) == [
        SharedParameter(("0.weight", "3.weight"), (0, 1)),
        SharedParameter(("0.bias", "1.bias", "2.bias"), (0, 1)),
    ]


def test_parameters_shared_within_a_stage_are_no_matter():
    """One device has one copy; nothing needs to be said."""
    model = chain(3)
    model[1].weight = model[0].weight
    assert shared_parameters(partition(model, [2, 1])) == []
