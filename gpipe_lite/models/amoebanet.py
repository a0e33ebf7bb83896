"""AmoebaNet-D, the image model of the paper, as a chain of L + 6 layers.

Every cell takes the outputs of the two layers before it, so what passes from layer to layer, and thus over
every boundary between stages, is a pair ``(current, previous)``::

    layer                  pixels, of 224   width
    stem, a convolution    112
    reduction cell         56               D/4
    reduction cell         28               D/2
    L/3 normal cells       28               D
    reduction cell         14               2D
    L/3 normal cells       14               2D
    reduction cell         7                4D
    L/3 normal cells       7                4D
    head                   logits

A cell's width is the number of channels of each of its states; its output joins three or four of them.

Sources: the architecture is by Real et al., *Regularized Evolution for Image Classifier Architecture Search*,
arXiv 1802.01548. The specification is ``models/official/amoeba_net`` of github.com/tensorflow/tpu. Huang et
al., *GPipe*, arXiv 1811.06965, train it; Kim et al., *torchgpipe*, arXiv 2004.09910, train a variant.
"""

from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

Variant = Literal["specification", "torchgpipe"]
StemKind = Literal["imagenet", "small"]
Pair = tuple[Tensor, Tensor]
"""The outputs of the last layer and of the one before it, each of shape (N, channels, height, width)."""

Operand = tuple[str, int]
"""An operation, and the state to which it is applied."""


@dataclass(frozen=True)
class Genotype:
    """What a cell computes, as data.

    State 0 is the projected output of the last layer, state 1 that of the layer before it.

    Attributes:
        sums: each sum of two operands makes the next state, from state 2 on.
        concat: the states that are joined to the cell's output.
    """

    sums: tuple[tuple[Operand, Operand], ...]
    concat: tuple[int, ...]


NORMAL = Genotype(
    sums=(
        (("conv 1x1", 1), ("max 3x3", 1)),  # state 2
        (("identity", 1), ("conv 1x7 7x1", 0)),  # state 3
        (("conv 1x1", 0), ("conv 1x7 7x1", 0)),  # state 4
        (("max 3x3", 2), ("identity", 2)),  # state 5
        (("avg 3x3", 1), ("conv 1x1", 5)),  # state 6
    ),
    # A cell joins the states that no operation uses, here 3, 4 and 6. Yet the specification lists state 0,
    # which two operations use, as unused too (github.com/tensorflow/tpu/issues/130). The paper's parameter
    # counts need it: without it they come out 12-13% too low.
    concat=(0, 3, 4, 6),
)
REDUCTION = Genotype(
    sums=(
        (("max 2x2", 0), ("max 3x3", 0)),  # state 2
        (("identity", 2), ("conv 3x3", 1)),  # state 3
        (("conv 1x7 7x1", 2), ("max 3x3", 2)),  # state 4
        (("identity", 3), ("max 2x2", 1)),  # state 5
        (("avg 3x3", 2), ("conv 1x1", 3)),  # state 6
    ),
    concat=(4, 5, 6),
)


def amoebanetd(
    num_layers: int,
    num_filters: int,
    num_classes: int | None = None,
    *,
    in_channels: int = 3,
    variant: Variant = "specification",
    stem: StemKind = "imagenet",
) -> nn.Sequential:
    """Build AmoebaNet-D (L, D).

    >>> with torch.device("meta"):
    ...     model = amoebanetd(num_layers=18, num_filters=208)
    >>> len(model), sum(p.numel() for p in model.parameters())
    (24, 81140766)

    The specification's variant has a stem convolution of 32 filters, stem cells of width D/4 and D/2, and
    leaves state 1 of the first of them unprojected. In torchgpipe's these are D/4, D/2 and D, and it is
    projected. What only helps a long training on ImageNet is left out: auxiliary head, dropped paths, dropout.

    Args:
        num_layers: L, the number of normal cells, a multiple of 3.
        num_filters: D, a multiple of 16, or of 8 in torchgpipe's variant.
        num_classes: by default the variant's: 1001 in the specification, where one class is "background", and
            1000 in torchgpipe.
        in_channels: of the images: 3 for colour, 1 for grey.
        variant: "specification" or "torchgpipe".
        stem: "imagenet" halves height and width three times before the first normal cell, as published.
            "small", for images such as digits or CIFAR's, keeps them: its three layers have stride 1. The
            parameters are the same.

    Returns:
        L + 6 layers, named "0", "1" and so on. They take images of shape (N, in_channels, H, W), best with
        mean 0 and standard deviation 1, and give logits of shape (N, num_classes). The last cells see
        H/32 × W/32 pixels, or H/4 × W/4 behind the small stem, rounded up. To train, BatchNorm needs more than
        one value: more than 1 pixel there, or more than 1 image in the micro-batch.

    Raises:
        ValueError: if a number or a name is none of these.
    """
    _check_choice("variant", variant, get_args(Variant))
    _check_choice("stem", stem, get_args(StemKind))
    specification = variant == "specification"
    classes = num_classes if num_classes is not None else 1001 if specification else 1000
    _check_multiple("num_layers", num_layers, 3, "normal cells come in three equal groups")
    _check_multiple(
        "num_filters",
        num_filters,
        16 if specification else 8,
        f"the first cell is D/{4 if specification else 2} wide, and its bottlenecks are a quarter of that",
    )
    _check_multiple("num_classes", classes, 1, "there is 1 logit a class")
    _check_multiple("in_channels", in_channels, 1, "colour images have 3, grey ones 1")

    width = num_filters
    stem_filters = 32 if specification else width // 4
    stem_widths = (width // 4, width // 2) if specification else (width // 2, width)
    stem_stride = 2 if stem == "imagenet" else 1

    plan = [(REDUCTION, stem_width, stem_stride) for stem_width in stem_widths]
    for scale in (1, 2, 4):
        if scale > 1:
            plan.append((REDUCTION, scale * width, 2))
        plan += [(NORMAL, scale * width, 1)] * (num_layers // 3)

    layers: list[nn.Module] = [Stem(in_channels, stem_filters, stem_stride)]
    current = previous = stem_filters
    previous_stride = 1
    for genotype, cell_width, stride in plan:
        # Before the first cell there is no previous cell: the specification takes the stem's output as it is.
        project = previous_stride if len(layers) > 1 or not specification else None
        layers.append(Cell(genotype, current, previous, cell_width, stride, project))
        current, previous = cell_width * len(genotype.concat), current
        previous_stride = stride
    return nn.Sequential(*layers, Head(current, classes))


class Stem(nn.Module):
    """The first convolution, 3×3. A ReLU before it, as in the cells, would cut off an image's dark half."""

    def __init__(self, in_channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, filters, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(filters)

    def forward(self, images: Tensor) -> Pair:
        """Turn images into the first pair, whose two tensors are one."""
        x = self.norm(self.conv(images))
        return x, x


class Cell(nn.Module):
    """A cell, as its genotype says.

    Args:
        genotype: of the cell.
        current: channels of the last layer's output.
        previous: channels of the output before it.
        width: channels of each state.
        stride: of the operations on states 0 and 1.
        project: how many times larger the previous output is than the current one, 1 or 2, which a projection
            undoes; None takes the previous output as it is.
    """

    def __init__(
        self, genotype: Genotype, current: int, previous: int, width: int, stride: int, project: int | None
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.project_current = Conv(current, width)
        self.project_previous = nn.Identity() if project is None else _project(previous, width, project)
        channels = [width, previous if project is None else width]
        for state, operands in enumerate(genotype.sums, start=2):
            operations = [_operation(name, channels[i], width, stride if i < 2 else 1) for name, i in operands]
            self.add_module(f"state{state}", nn.ModuleList(operations))
            channels.append(width)

    def forward(self, pair: Pair) -> Pair:
        """Turn (current, previous) into (output, current)."""
        current, previous = pair
        states = [self.project_current(current), self.project_previous(previous)]
        for state, ((_, i), (_, j)) in enumerate(self.genotype.sums, start=2):
            left, right = cast(nn.ModuleList, self.get_submodule(f"state{state}"))
            states.append(left(states[i]) + right(states[j]))
        return torch.cat([states[i] for i in self.genotype.concat], dim=1), current


class Head(nn.Module):
    """The classifier: ReLU, the mean over all pixels, a linear layer."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, pair: Pair) -> Tensor:
        """Turn the last pair into logits of shape (N, num_classes)."""
        current, _ = pair
        return cast(Tensor, self.linear(functional.relu(current).mean(dim=(2, 3))))


class Conv(nn.Module):
    """ReLU, convolution, BatchNorm. The ReLU is not in place, since other operations read the same state."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: tuple[int, int] = (1, 1),
        stride: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """From shape (N, in_channels, H, W) to (N, out_channels, H / stride, W / stride), rounded up."""
        return cast(Tensor, self.norm(self.conv(functional.relu(x))))


class FactorisedReduction(nn.Module):
    """Halves height and width: half of the channels look at the even rows and columns, half at the odd."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """From shape (N, in_channels, H, W) to (N, out_channels, H/2, W/2), rounded up."""
        x = functional.relu(x)
        shifted = functional.pad(x, (-1, 1, -1, 1))  # one pixel up and to the left
        return cast(Tensor, self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1)))


def _operation(name: str, in_channels: int, width: int, stride: int) -> nn.Module:
    """An operation of a genotype: its output has ``width`` channels and 1/stride of the height and width."""
    quarter = width // 4
    match name:
        case "identity":
            same = in_channels == width and stride == 1
            return nn.Identity() if same else _project(in_channels, width, stride)
        case "conv 1x1":
            return Conv(in_channels, width, stride=(stride, stride))
        case "conv 3x3":
            return nn.Sequential(
                Conv(in_channels, quarter),
                Conv(quarter, quarter, (3, 3), (stride, stride)),
                Conv(quarter, width),
            )
        case "conv 1x7 7x1":
            return nn.Sequential(
                Conv(in_channels, quarter),
                Conv(quarter, quarter, (1, 7), (1, stride)),
                Conv(quarter, quarter, (7, 1), (stride, 1)),
                Conv(quarter, width),
            )
        case "avg 3x3":
            pool: nn.Module = nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
        case "max 3x3":
            pool = nn.MaxPool2d(3, stride, padding=1)
        case "max 2x2" if stride == 1:  # keeps the size: the last row and column see themselves alone
            pool = nn.Sequential(nn.ConstantPad2d((0, 1, 0, 1), -torch.inf), nn.MaxPool2d(2, stride))
        case "max 2x2":
            pool = nn.MaxPool2d(2, stride, ceil_mode=True)
        case _:
            raise ValueError(f"there is no operation {name!r}: write one of those in NORMAL and REDUCTION")
    if in_channels == width:
        return pool
    # A pool keeps its channels; the specification then puts a convolution, here without ReLU, behind it.
    return nn.Sequential(pool, nn.Conv2d(in_channels, width, 1, bias=False), nn.BatchNorm2d(width))


def _project(in_channels: int, width: int, stride: int) -> nn.Module:
    """The cheapest way to ``width`` channels and 1/stride of the height and width."""
    return Conv(in_channels, width) if stride == 1 else FactorisedReduction(in_channels, width)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {' or '.join(map(repr, choices))}, not {value!r}")


def _check_multiple(name: str, value: int, of: int, why: str) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and value >= 1 and value % of == 0:
        return
    kind = f"a multiple of {of}" if of > 1 else "a whole number, 1 or more"
    below = value // of * of if whole else 0
    way_out = f"take {below} or {below + of}" if below > 0 else f"take {of} or more"
    raise ValueError(f"{name} is {kind}, since {why}, and not {value!r}: {way_out}")
