"""Splitting and merging are inverse, whatever the batch nests."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_structure

from gpipe_lite.microbatch import batch_size, flatten, map_tensors, merge, sizes, split, unflatten

Pair = namedtuple("Pair", "left right")


@dataclass
class Tokens:
    """A dataclass that torch knows."""

    ids: Tensor
    pad: int


@dataclass
class Unknown:
    """A dataclass that torch does not know."""

    ids: object


torch.export.register_dataclass(Tokens)

dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64])
shapes = st.lists(st.integers(0, 3), max_size=2)
others = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.just(np.arange(3)))


def tensors(num_samples):
    def make(shape, dtype):
        values = torch.arange(torch.Size((num_samples, *shape)).numel())
        return values.to(dtype).reshape(num_samples, *shape)

    return st.builds(make, shapes, dtypes)


def batches(num_samples):
    """Nestings that hold at least one tensor of ``num_samples`` samples."""
    tensor = tensors(num_samples)
    nested = st.recursive(
        tensor | others,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner),
            st.dictionaries(st.sampled_from("abc"), inner).map(OrderedDict),
            st.builds(Pair, inner, inner),
            st.builds(Tokens, tensor, st.integers()),
        ),
        max_leaves=6,
    )
    return tensor | st.tuples(tensor, tensor) | st.tuples(tensor, nested)


def same(one, other):
    """Equal structure, and leaves equal to the bit, or the same object."""
    leaves, others = tree_flatten(one)[0], tree_flatten(other)[0]
    return tree_structure(one) == tree_structure(other) and all(
        a is b or (isinstance(a, Tensor) and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in zip(leaves, others, strict=True)
    )


@given(st.integers(1, 200), st.integers(1, 200))
def test_sizes_are_as_equal_as_can_be(num_samples, num_micro_batches):
    """They add up to N, none is 0, they differ by at most one, the larger first."""
    found = sizes(num_samples, num_micro_batches)
    assert sum(found) == num_samples
    assert len(found) == min(num_samples, num_micro_batches)
    assert found == sorted(found, reverse=True)
    assert found[0] - found[-1] <= 1


@given(st.integers(1, 7), st.integers(1, 9), st.data())
def test_merge_undoes_split(num_samples, num_micro_batches, data):
    """Any nesting, dtype, shape and number of micro-batches."""
    batch = data.draw(batches(num_samples))
    assert same(merge(split(batch, num_micro_batches)), batch)


@given(st.integers(1, 7), st.integers(1, 9), st.data())
def test_every_micro_batch_has_its_size(num_samples, num_micro_batches, data):
    """What split gives is what sizes says and batch_size finds."""
    batch = data.draw(batches(num_samples))
    assert batch_size(batch) == num_samples
    found = [batch_size(micro_batch) for micro_batch in split(batch, num_micro_batches)]
    assert found == sizes(num_samples, num_micro_batches)


@given(st.data())
def test_unflatten_undoes_flatten(data):
    """The short ways for a tensor and a tuple of tensors agree with torch's way, leaf by leaf."""
    value = data.draw(batches(2) | others | st.just(()))
    leaves, spec = flatten(value)
    expected, expected_spec = tree_flatten(value)
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in expected]
    assert spec == expected_spec
    assert same(unflatten(leaves, spec), value)


def test_unflatten_takes_other_leaves():
    """Gradients take the places of the values that they belong to."""
    for value in (torch.ones(1), (torch.ones(1), torch.ones(2)), {"a": [torch.ones(1)]}):
        leaves, spec = flatten(value)
        numbers = list(range(len(leaves)))
        assert flatten(unflatten(numbers, spec)) == (numbers, spec)


def test_map_tensors_leaves_everything_else():
    """The function sees tensors only."""
    label = object()
    assert map_tensors(len, {"x": torch.ones(3), "label": label}) == {"x": 3, "label": label}


def test_micro_batches_are_views():
    """Nothing is copied, nested or not."""
    x = torch.arange(7.0)
    for pieces in (split(x, 3), [piece["x"] for piece in split({"x": x}, 3)]):
        assert [piece.untyped_storage().data_ptr() for piece in pieces] == [x.untyped_storage().data_ptr()] * 3
        assert [piece.storage_offset() for piece in pieces] == [0, 3, 5]


def test_a_layer_may_write_into_a_micro_batch():
    """Autograd lets it, as it would for the whole batch."""
    weight = torch.tensor(3.0, requires_grad=True)
    micro_batch = split(torch.ones(4), 2)[0]
    micro_batch.mul_(weight).sum().backward()
    assert weight.grad == 2


def test_what_is_not_a_tensor_goes_to_every_micro_batch():
    """It is the same object in each."""
    config = SimpleNamespace(pad=0)
    assert [piece[1] for piece in split((torch.ones(3), config), 2)] == [config, config]


def test_a_single_micro_batch_is_not_copied():
    """It is returned as it is, even if it could not be joined with another."""
    for value in (torch.ones(2), torch.tensor(1.0), {"loss": torch.tensor(1.0), "name": object()}):
        assert merge([value]) is value


def test_merge_passes_gradients_to_the_micro_batches():
    """Autograd sees through it."""
    x = torch.ones(5, 2, requires_grad=True)
    (merge(split(x, 2)) * torch.arange(5.0)[:, None]).sum().backward()
    assert torch.equal(x.grad, torch.arange(5.0)[:, None].expand(5, 2))


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ([1, "a", None], TypeError, r"at least 1 tensor.*0 in \[1, 'a', None\]"),
        (torch.tensor(1.0), ValueError, "batch is a tensor of 0 axes"),
        ({"x": torch.ones(2), "t": torch.tensor(1)}, ValueError, r"batch\['t'\] is a tensor of 0 axes"),
        (torch.ones(0, 3), ValueError, r"0 samples, tensor\(0, 3\)"),
        (
            (torch.ones(4, 2), {"y": [torch.ones(3)]}),
            ValueError,
            r"batch\[0\] has 4 samples, shape \(4, 2\), and batch\[1\]\['y'\]\[0\] has 3, shape \(3,\)",
        ),
        (Pair(torch.ones(2), Unknown(torch.ones(2))), TypeError, r"value\.right is a Unknown whose tensors"),
        (Unknown([torch.ones(2)]), TypeError, "value is a Unknown"),
        ([UserDict(x=torch.ones(2))], TypeError, r"value\[0\] is a UserDict"),
        ({"s": {torch.ones(2)}}, TypeError, r"value\['s'\] is a set"),
        (torch.eye(3).to_sparse(), TypeError, "batch is a sparse_coo tensor, which cannot be cut"),
        ([torch.ones(2), torch.eye(2).to_sparse()], TypeError, r"batch\[1\] is a sparse_coo tensor"),
        (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            TypeError,
            "batch is a nested tensor, which cannot be cut along the first axis: make it dense, padded",
        ),
    ],
)
def test_a_batch_without_a_clear_size_is_refused(batch, error, words):
    """The error says where in the batch, and shows the shapes."""
    with pytest.raises(error, match=words):
        split(batch, 2)


def test_containers_without_tensors_are_values():
    """Only what hides tensors is refused."""
    values = [Unknown(3), UserDict(a=1), {1, 2}, Unknown]
    assert flatten(values)[0] == values


@pytest.mark.parametrize("number", [0, -1, 1.0, True, None])
def test_the_number_of_micro_batches_is_whole_and_positive(number):
    """The error shows it."""
    with pytest.raises(ValueError, match=f"micro-batches, 1 or more, not {number}"):
        split(torch.ones(4), number)
    with pytest.raises(ValueError, match=f"samples, 1 or more, not {number}"):
        sizes(number, 1)


@pytest.mark.parametrize(
    ("micro_batches", "words"),
    [
        ([], "0 micro-batches"),
        (
            [torch.ones(2), torch.ones(2), (torch.ones(2),)],
            r"micro-batch 0 is tensor\(2,\), and micro-batch 2 is \(tensor\(2,\),\)",
        ),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], "return the same structure"),
        ([torch.tensor(1.0), torch.tensor(2.0)], "output is a tensor of 0 axes in micro-batch 0 of 2"),
        (
            [(torch.ones(1, 3),), (torch.ones(2, 4),)],
            r"output\[0\] has shape \(1, 3\).* and \(2, 4\) in micro-",
        ),
        (
            [[torch.ones(2), 1], [torch.ones(2), 2]],
            r"output\[1\] is 1 in micro-batch 0, and 2 in micro-batch 1",
        ),
        ([[torch.ones(2), 1], [torch.ones(2), 1.0]], r"is 1 in micro-batch 0, and 1\.0 in"),
        (
            [[torch.ones(2)], [None]],
            r"output\[0\] is tensor\(2,\) in micro-batch 0, and None in micro-batch 1",
        ),
        ([[None], [torch.ones(2)]], r"output\[0\] is None in micro-batch 0, and tensor\(2,\) in"),
        ([[np.ones(2)], [np.ones(3)]], r"output\[0\] is array"),
        ([[np.ones(2)], [np.zeros(2)]], r"output\[0\] is array"),
    ],
)
def test_micro_batches_that_do_not_fit_together_are_refused(micro_batches, words):
    """The error says where in the output, and shows both."""
    with pytest.raises(ValueError, match=words):
        merge(micro_batches)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([(5, 2), (5, 2)], r"shape \(5, 2\) for the 3 samples of micro-batch 0: they are joined along the first axis"),
        ([(1, 3), (1, 3)], r"shape \(1, 3\) for the 3 samples of micro-batch 0"),
        (
            [(3, 2), (4, 2)],
            r"shape \(4, 2\) for the 2 samples of micro-batch 1, and \(3, 2\) for the 3 of micro-batch 0",
        ),
    ],
)
def test_a_first_axis_that_is_not_of_samples_is_refused(parts, words):
    """Such as time, or one value for all: joined they would be something else than the whole batch's."""
    with pytest.raises(ValueError, match=words):
        merge([torch.ones(shape) for shape in parts], [3, 2])
    assert merge([torch.ones(6, 2), torch.ones(4, 2)], [3, 2]).shape == (10, 2), "two rows a sample are"


def test_packed_sequences_are_refused_at_the_end():
    """They hold all samples step by step; the error says what to call."""
    packed = [nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)]) for _ in range(2)]
    with pytest.raises(TypeError, match="pad_packed_sequence"):
        merge(packed)


def test_values_that_are_equal_agree():
    """They need not be the same object, arrays included; the first is kept."""
    first, second = (torch.ones(1), "ab", np.ones(2)), (torch.ones(2), "".join("ab"), np.ones(2))
    merged = merge([first, second])
    assert merged[0].shape == (3,)
    assert merged[1] == "ab"
    assert merged[2] is first[2]
