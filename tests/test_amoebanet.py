"""AmoebaNet-D is the published one: its sizes, its wiring, its operations."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from gpipe_lite.models import amoebanet, amoebanetd
from gpipe_lite.models.amoebanet import NORMAL, REDUCTION, FactorisedReduction

SIZES = [(18, 208), (18, 416), (18, 544), (36, 544), (72, 512)]
COUNTS = {
    "specification": [81_140_766, 317_548_353, 540_204_945, 1_053_302_481, 1_842_618_441],
    "torchgpipe": [81_505_540, 319_024_120, 542_734_840, 1_055_832_376, 1_844_858_344],
}
PAPER = [82e6, 318e6, 542e6, 1.05e9, 1.8e9]  # Huang et al., arXiv 1811.06965v5, Table 1


def on_meta(*args, **kwargs):
    with torch.device("meta"):
        return amoebanetd(*args, **kwargs)


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def cell_for(genotype, width=4):
    """A cell whose inputs both have 6 channels, in evaluation mode with statistics that do something."""
    torch.manual_seed(0)
    stride = 2 if genotype is REDUCTION else 1
    cell = amoebanet.Cell(genotype, 6, 6, width, stride, project=1).double()
    for module in cell.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 1.5)
    return cell.eval()


@pytest.mark.parametrize("variant", COUNTS)
@pytest.mark.parametrize("column", range(5))
def test_parameter_counts_are_the_published_code_s_to_the_digit(variant, column):
    """The counts of tensorflow/tpu's specification and of torchgpipe's benchmark, for the paper's five sizes."""
    assert num_parameters(on_meta(*SIZES[column], variant=variant)) == COUNTS[variant][column]


@pytest.mark.parametrize("column", range(5))
def test_parameter_counts_are_near_the_paper_s(column):
    """Within 1.2% in its first four columns, and 3% in the last, of which it prints two digits."""
    count = num_parameters(on_meta(*SIZES[column]))
    assert count == pytest.approx(PAPER[column], rel=0.012 if column < 4 else 0.03)


def test_without_state_0_the_count_misses_the_paper_s(monkeypatch):
    """The genotype's quirk is needed: joining only the unused states costs 12 to 13% of the parameters."""
    monkeypatch.setattr(amoebanet, "NORMAL", replace(NORMAL, concat=(3, 4, 6)))
    for size, paper in zip(SIZES[:4], PAPER[:4], strict=True):
        assert 0.11 < 1 - num_parameters(on_meta(*size)) / paper < 0.14


def test_the_normal_cell_uses_state_0_and_joins_it_too():
    """Every other joined state is one that no operation uses."""
    for genotype, quirk in ((NORMAL, {0}), (REDUCTION, set())):
        used = {state for operands in genotype.sums for _, state in operands}
        assert used & set(genotype.concat) == quirk
        assert used | set(genotype.concat) == set(range(7))


@given(
    groups=st.integers(1, 4),
    scale=st.integers(1, 4),
    variant=st.sampled_from(["specification", "torchgpipe"]),
    stem=st.sampled_from(["imagenet", "small"]),
)
def test_a_model_is_l_plus_6_layers_named_by_their_position(groups, scale, variant, stem):
    """Whatever its size, variant and stem."""
    model = on_meta(3 * groups, 16 * scale, 10, variant=variant, stem=stem)
    assert [name for name, _ in model.named_children()] == [str(i) for i in range(3 * groups + 6)]


@pytest.mark.parametrize("num_filters", [16, 128, 208])
@pytest.mark.parametrize("variant", COUNTS)
def test_the_stem_changes_no_parameter_count(num_filters, variant):
    """Also at D = 128, where the specification's stem and its first cell are equally wide."""
    imagenet, small = (on_meta(3, num_filters, variant=variant, stem=stem) for stem in ("imagenet", "small"))
    assert num_parameters(imagenet) == num_parameters(small)


def test_state_dict_keys_say_layer_state_operand():
    """Layer 3, state 4, right operand, second convolution."""
    assert "3.state4.1.1.conv.weight" in amoebanetd(3, 16, 10).state_dict()


@pytest.mark.parametrize("variant", COUNTS)
@pytest.mark.parametrize("stem", ["imagenet", "small"])
def test_every_boundary_is_crossed_by_the_outputs_of_the_two_layers_before(variant, stem):
    """The pair is (current, previous), and the previous one is the very tensor that was current."""
    values = [torch.empty(2, 3, 64, 64, device="meta")]
    model = on_meta(6, 16, 10, variant=variant, stem=stem)
    for layer in model:
        values.append(layer(values[-1]))
    pairs = values[1:-1]
    assert len(pairs) == 11
    for (earlier, _), (_, previous) in pairwise(pairs):
        assert previous is earlier
    assert pairs[0][0] is pairs[0][1]
    assert values[-1].shape == (2, 10)


@pytest.mark.parametrize(
    ("stem", "size", "pixels"),
    [
        ("imagenet", 224, [112, 56, 28, 28, 14, 14, 7, 7]),
        ("imagenet", 331, [166, 83, 42, 42, 21, 21, 11, 11]),
        ("small", 8, [8, 8, 8, 8, 4, 4, 2, 2]),
        ("small", 32, [32, 32, 32, 32, 16, 16, 8, 8]),
        ("small", 29, [29, 29, 29, 29, 15, 15, 8, 8]),
    ],
)
def test_pixels_halve_rounded_up_and_widths_double(stem, size, pixels):
    """For even and odd sizes; the channels are the width times the number of joined states."""
    value = torch.empty(2, 3, size, size, device="meta")
    shapes = []
    for layer in on_meta(3, 16, 10, stem=stem)[:-1]:
        value = layer(value)
        shapes.append(tuple(value[0].shape[1:]))
    channels = [32, 3 * 4, 3 * 8, 4 * 16, 3 * 32, 4 * 32, 3 * 64, 4 * 64]
    assert shapes == [(c, p, p) for c, p in zip(channels, pixels, strict=True)]


def test_the_normal_cell_is_wired_as_published():
    """Written out by hand, with the cell's own operations."""
    cell = cell_for(NORMAL)
    current, previous = torch.randn(2, 2, 6, 5, 5, dtype=torch.float64)
    s0, s1 = cell.project_current(current), cell.project_previous(previous)
    max_pool = nn.MaxPool2d(3, 1, 1)
    s2 = cell.state2[0](s1) + max_pool(s1)
    s3 = s1 + cell.state3[1](s0)
    s4 = cell.state4[0](s0) + cell.state4[1](s0)
    s5 = max_pool(s2) + s2
    s6 = functional.avg_pool2d(s1, 3, 1, 1, count_include_pad=False) + cell.state6[1](s5)
    output, now_previous = cell((current, previous))
    torch.testing.assert_close(output, torch.cat([s0, s3, s4, s6], dim=1))
    assert now_previous is current
    kernels = [[conv.kernel_size for conv in op.modules() if isinstance(conv, nn.Conv2d)] for op in cell.state4]
    assert kernels == [[(1, 1)], [(1, 1), (1, 7), (7, 1), (1, 1)]]
    assert [conv.out_channels for conv in cell.state3[1].modules() if isinstance(conv, nn.Conv2d)] == [1, 1, 1, 4]


@pytest.mark.parametrize("pixels", [6, 7])
def test_the_reduction_cell_is_wired_as_published(pixels):
    """Written out by hand, with the cell's own convolutions: only states 0 and 1 are read with stride 2."""
    cell = cell_for(REDUCTION)
    current, previous = torch.randn(2, 2, 6, pixels, pixels, dtype=torch.float64)
    s0, s1 = cell.project_current(current), cell.project_previous(previous)
    halve = nn.MaxPool2d(2, 2, ceil_mode=True)
    s2 = halve(s0) + functional.max_pool2d(s0, 3, 2, 1)
    s3 = s2 + cell.state3[1](s1)
    s4 = cell.state4[0](s2) + functional.max_pool2d(s2, 3, 1, 1)
    s5 = s3 + halve(s1)
    s6 = functional.avg_pool2d(s2, 3, 1, 1, count_include_pad=False) + cell.state6[1](s3)
    output, _ = cell((current, previous))
    torch.testing.assert_close(output, torch.cat([s4, s5, s6], dim=1))
    kernels = [conv.kernel_size for conv in cell.state3[1].modules() if isinstance(conv, nn.Conv2d)]
    assert kernels == [(1, 1), (3, 3), (1, 1)]


@pytest.mark.parametrize(("name", "stride"), [("max 2x2", 1), ("max 2x2", 2), ("max 3x3", 1), ("max 3x3", 2)])
def test_max_pools_take_the_maximum_of_their_window(name, stride):
    """Against loops over pixels; all inputs are negative, so that padding with zeros would show."""
    x = -1 - torch.rand(1, 1, 5, 5)
    start, stop = (0, 2) if name == "max 2x2" else (-1, 2)
    expected = [
        [x[0, 0, max(0, r + start) : r + stop, max(0, c + start) : c + stop].max() for c in range(0, 5, stride)]
        for r in range(0, 5, stride)
    ]
    torch.testing.assert_close(amoebanet._operation(name, 1, 1, stride)(x)[0, 0], torch.tensor(expected))


def test_a_convolution_is_relu_convolution_batch_norm_without_bias():
    """The ReLU comes first and leaves its input as it was; the stem alone has none."""
    conv = amoebanet.Conv(3, 5, (3, 3)).eval()
    x = torch.randn(2, 3, 4, 4)
    before = x.clone()
    torch.testing.assert_close(conv(x), conv.norm(functional.conv2d(x.relu(), conv.conv.weight, padding=1)))
    assert torch.equal(x, before)
    assert all(module.bias is None for module in amoebanetd(3, 16).modules() if isinstance(module, nn.Conv2d))
    stem = amoebanet.Stem(3, 5, 2).eval()
    assert not torch.equal(stem(x)[0], stem(x.relu())[0])


def test_the_head_is_linear_in_the_mean_of_what_is_positive():
    """The specification has a ReLU before the mean over pixels; the previous output is not used."""
    head = amoebanet.Head(3, 2)
    x = torch.randn(4, 3, 5, 6)
    torch.testing.assert_close(head((x, x)), head.linear(x.clamp(min=0).sum((2, 3)) / 30))
    assert torch.equal(head((x, x)), head((x, x + 1)))


def test_a_factorised_reduction_reads_even_rows_and_columns_and_odd_ones():
    """Half of the channels each; where an odd row is missing at the edge, there are zeros."""
    reduction = FactorisedReduction(3, 4).eval()
    x = torch.rand(2, 3, 5, 5)
    padded = functional.pad(x, (0, 1, 0, 1))
    even = functional.conv2d(padded[:, :, ::2, ::2], reduction.even.weight)
    odd = functional.conv2d(padded[:, :, 1::2, 1::2], reduction.odd.weight)
    torch.testing.assert_close(reduction(x), reduction.norm(torch.cat([even, odd], dim=1)))


def test_an_identity_changes_the_shape_only_if_it_must():
    """With stride 2 it is a factorised reduction, between two widths a convolution."""
    assert isinstance(amoebanet._operation("identity", 4, 4, 1), nn.Identity)
    assert isinstance(amoebanet._operation("identity", 4, 4, 2), FactorisedReduction)
    assert isinstance(amoebanet._operation("identity", 4, 8, 1), amoebanet.Conv)


def test_the_first_cell_takes_the_stem_as_it_is_in_the_specification_only():
    """State 1 is unprojected there; torchgpipe projects it."""
    first = amoebanetd(3, 16)[1]
    assert isinstance(first.project_previous, nn.Identity)
    assert isinstance(amoebanetd(3, 16, variant="torchgpipe")[1].project_previous, amoebanet.Conv)
    x = torch.randn(2, 32, 4, 4)
    assert first((x, x))[0].shape == (2, 12, 2, 2)


@pytest.mark.parametrize("variant", COUNTS)
@pytest.mark.parametrize("stem", ["imagenet", "small"])
def test_every_parameter_gets_a_gradient(variant, stem):
    """In float64, on grey images: no part of the model is left out of the sum."""
    torch.manual_seed(0)
    model = amoebanetd(3, 16, 10, in_channels=1, variant=variant, stem=stem).double()
    images = torch.randn(3, 1, 16, 16, dtype=torch.float64)
    functional.cross_entropy(model(images), torch.tensor([1, 2, 3])).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_number_of_classes_is_the_variant_s_unless_given():
    """1001 in the specification, 1000 in torchgpipe."""
    assert on_meta(3, 16)[-1].linear.out_features == 1001
    assert on_meta(3, 16, variant="torchgpipe")[-1].linear.out_features == 1000
    assert on_meta(3, 16, 7)[-1].linear.out_features == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 4}, r"num_layers is a multiple of 3, .* not 4: take 3 or 6"),
        ({"num_layers": 0}, r"num_layers is a multiple of 3, .* not 0: take 3 or more"),
        ({"num_layers": -3}, r"not -3: take 3 or more"),
        ({"num_layers": 3.0}, r"not 3\.0: take 3 or more"),
        ({"num_layers": True}, r"not True: take 3 or more"),
        ({"num_filters": 40}, r"num_filters is a multiple of 16, .* D/4 .* not 40: take 32 or 48"),
        ({"num_filters": 8}, r"not 8: take 16 or more"),
        ({"num_filters": 20, "variant": "torchgpipe"}, r"a multiple of 8, .* D/2 .* not 20: take 16 or 24"),
        ({"num_classes": 0}, r"num_classes is a whole number, 1 or more, .* not 0"),
        ({"in_channels": -1}, r"in_channels is a whole number, 1 or more, .* not -1"),
        ({"variant": "lingvo"}, r"variant is 'specification' or 'torchgpipe', not 'lingvo'"),
        ({"stem": "tiny"}, r"stem is 'imagenet' or 'small', not 'tiny'"),
    ],
)
def test_an_impossible_model_is_refused_with_the_way_out(arguments, message):
    """The error names the argument, what it may be and what it is."""
    with pytest.raises(ValueError, match=message):
        amoebanetd(**{"num_layers": 3, "num_filters": 16, **arguments})


def test_an_unknown_operation_is_named(monkeypatch):
    """For those who write a genotype of their own."""
    sums = ((("conv 5x5", 0), ("identity", 0)),)
    monkeypatch.setattr(amoebanet, "NORMAL", replace(NORMAL, sums=sums, concat=(2,)))
    with pytest.raises(ValueError, match="no operation 'conv 5x5'"):
        amoebanetd(3, 16)
