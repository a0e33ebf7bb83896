"""Cut a model into partitions, contiguous runs of its layers, and check that it can be cut.

The partitions hold the model's own layers under their own names; nothing is copied or moved::

    Sequential(embed, block1, block2, head)   balance [2, 2]

    Sequential(embed, block1)   Sequential(block2, head)
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, SupportsIndex

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from gpipe_lite.balance import check_balance


class SharedParameter(NamedTuple):
    """A parameter that several stages use: its names in the model, and the stages."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


def partition(module: nn.Sequential, balance: Iterable[SupportsIndex]) -> list[nn.Sequential]:
    """Cut a model into partitions.

    >>> first, second = partition(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), [2, 1])
    >>> list(second.state_dict())
    ['2.weight', '2.bias']

    Args:
        module: the model, a plain chain of layers.
        balance: the number of layers of each partition.

    Returns:
        One ``nn.Sequential`` a stage with the model's own layers, named as in the model: the keys of the
        partitions' state_dicts together are the model's.

    Raises:
        TypeError: if the module is not a plain ``nn.Sequential``, or the balance not of whole numbers.
        ValueError: if the module has no layers or one of them twice, or the balance does not cover it.
    """
    check_model(module)
    layers = module.named_children()
    partitions = [nn.Sequential(OrderedDict(islice(layers, n))) for n in check_balance(balance, len(module))]
    for stage in partitions:
        stage.training = module.training  # each layer keeps its own mode
    return partitions


def check_model(module: nn.Module) -> None:
    """Check that a model is a chain of layers that can be cut anywhere.

    Raises:
        TypeError: if it is not an ``nn.Sequential``, or one with a forward method of its own.
        ValueError: if it has no layers, the same layer at two places, or more than layers.
    """
    kind = type(module).__name__
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"a pipeline cuts an nn.Sequential between its layers, and this is a {kind}: "
            "write it as nn.Sequential(layer, layer, ...), where each takes what the one before returns"
        )
    if type(module).forward is not nn.Sequential.forward or "forward" in vars(module):
        raise TypeError(
            f"{kind} is an nn.Sequential with a forward method of its own, which a pipeline would not call: "
            "move what it does into a layer"
        )
    if len(module) == 0:
        raise ValueError("the model has 0 layers: put 1 or more into the nn.Sequential")
    for what, owned in (("parameters", module._parameters), ("buffers", module._buffers)):
        if owned:
            raise ValueError(
                f"the nn.Sequential itself has {what}, {', '.join(owned)}, which no stage would hold: "
                "give them to a layer"
            )
    if any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks") and isinstance(hooks, dict)):
        raise ValueError(
            "there are hooks on the nn.Sequential itself, which a pipeline would not call: register them on a layer, "
            "or on the pipe once it is built"
        )
    for name, part in module.named_modules():
        if isinstance(part, _NormBase) and _is_unknown(part):
            raise ValueError(
                f"layer {name!r} is a {type(part).__name__} that does not know its size, and would learn it amid a "
                "step: run the model once on a sample before"
            )
    first_at: dict[nn.Module, int] = {}
    for i, layer in enumerate(module):
        if (first := first_at.setdefault(layer, i)) != i:
            raise ValueError(
                f"layers {first} and {i} are one {type(layer).__name__} object, and a layer has one place: "
                f"make two layers; to share weights, give layer {i} the parameters of layer {first}"
            )


def _is_unknown(part: nn.Module) -> bool:
    """Whether a layer is a lazy one that has not run yet."""
    return any(is_lazy(tensor) for tensor in (*part.parameters(False), *part.buffers(False)))


def layer_names(partitions: Sequence[nn.Sequential]) -> list[list[str]]:
    """The names of each stage's layers, as in the model's state_dict."""
    return [[name for name, _ in stage.named_children()] for stage in partitions]


def shared_parameters(partitions: Sequence[nn.Sequential]) -> list[SharedParameter]:
    """The parameters that more than one stage uses, such as an embedding tied to the output layer.

    Their gradients are sums over these stages, so the stages must hold one and the same copy.

    Returns:
        In the order of first use; empty if no stages share.
    """
    uses: dict[nn.Parameter, dict[str, int]] = {}
    for stage, layers in enumerate(partitions):
        for name, parameter in layers.named_parameters(remove_duplicate=False):
            uses.setdefault(parameter, {})[name] = stage
    found = [SharedParameter(tuple(use), tuple(sorted(set(use.values())))) for use in uses.values()]
    return [shared for shared in found if len(shared.stages) > 1]
