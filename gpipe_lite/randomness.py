"""One stream of random numbers for each (step, layer, micro-batch), whatever the threads' timing.

Two things go wrong with torch's default generator in a pipeline. Recomputation must draw the numbers that the
forward pass drew, or dropout drops other units. And all CPU threads share one generator, so what a stage draws
depends on which thread came first; saving and restoring its state around a stage does not help, because another
thread draws in between.

So a stage runs under a :class:`Stream`. It lets every torch function pass but those that draw random numbers (torch
tags them); these find the default generator seeded for their layer and micro-batch, one at a time, and leave it as
it was. The seed depends on the step's seed, the layer's index in the whole model and the micro-batch, not on the
stage: any number of stages, threads and recomputations draws the same numbers, bit for bit.

The step's seed is drawn from torch's default generator, once, by the first function of the step that needs it, so
``torch.manual_seed`` governs all, and a model that draws nothing leaves the generator untouched.
"""

import inspect
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWING = threading.Lock()
"""Held while the default generator carries a stream's state. Every draw of every pipeline takes it."""


class StepSeed:
    """The seed of one step, drawn when first needed, unless it is given.

    Attributes:
        is_used: whether anything was drawn from it.
    """

    def __init__(self, value: int | None = None) -> None:
        self._value = value
        self.is_used = False

    def of(self, layer: int, micro_batch: int) -> int:
        """The 64-bit seed of one layer's stream for one micro-batch. Call it with the lock held."""
        self.is_used = True
        if self._value is None:
            self._value = draw_seed()
        packed = struct.pack("<3q", self._value, layer, micro_batch)
        return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def draw_seed() -> int:
    """Draw a step's seed from torch's default generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.default_generator))


class CannotRepeatError(RuntimeError):
    """A layer draws random numbers in a way that no recomputation can repeat."""


class Stream(TorchFunctionMode):
    """Random numbers for one stage: enter it, then set ``layer`` and ``micro_batch`` before each layer.

    Args:
        seed: the step's.
        device: the stage's; its generator is governed beside the CPU's.
    """

    def __init__(self, seed: StepSeed, device: torch.device) -> None:
        super().__init__()
        self._repeats = False
        self._seed = seed
        self._generators = [torch.default_generator]
        if device.type == "cuda":  # pragma: no cover - needs CUDA
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._states: list[Tensor] | None = None
        self._at = (0, 0)
        # A compiled layer is traced with this mode. It may look at which functions draw, and not into drawing.
        self._draw = torch.compiler.disable(self._seeded) if "torch._dynamo" in sys.modules else self._seeded

    def at(self, layer: int, micro_batch: int, repeats: bool = False) -> None:
        """Start the stream of this layer and micro-batch from its beginning.

        Args:
            layer: its index in the model.
            micro_batch: m.
            repeats: whether a recomputation must be able to draw the same.
        """
        self._at = (layer, micro_batch)
        self._repeats = repeats
        self._states = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``; where it draws, let it draw from this stream."""
        kwargs = kwargs or {}
        if not draws(func) or _is_quiet(func, args, kwargs):
            return func(*args, **kwargs)
        return self._draw(func, args, kwargs)

    def _seeded(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call ``func`` on the generator seeded for this layer and micro-batch, or going on where it stopped."""
        self._refuse_what_cannot_be_repeated(func, kwargs)
        with _DRAWING:
            seed = self._seed.of(*self._at) if self._states is None else None
            before = [generator.get_state() for generator in self._generators]
            try:
                if seed is not None:
                    for generator in self._generators:
                        generator.manual_seed(seed)
                else:
                    _restore(self._generators, self._states or [])
                return func(*args, **kwargs)
            finally:
                self._states = [generator.get_state() for generator in self._generators]
                _restore(self._generators, before)

    def _refuse_what_cannot_be_repeated(self, func: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        generator = kwargs.get("generator")
        if self._repeats and generator is not None and generator not in self._generators:
            raise CannotRepeatError(
                f"{func.__name__} draws from a torch.Generator of the layer's own, so the recomputation of this "
                'micro-batch would draw other numbers: draw from torch\'s default generator, or use checkpoint="never"'
            )
        frame: FrameType | None = sys._getframe() if torch.is_grad_enabled() or self._repeats else None
        while frame is not None:
            if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                raise CannotRepeatError(
                    f"{func.__name__} draws random numbers inside torch.utils.checkpoint, whose own recomputation "
                    "would draw others: take that out of the layer, and let the pipeline recompute with "
                    'checkpoint="always"'
                )
            frame = frame.f_back


def _restore(generators: list[Generator], states: list[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


_PYTHON_FUNCTIONS_THAT_DRAW = re.compile(
    r"(alpha_|feature_alpha_)?dropout|dropout[123]d|rrelu|gumbel_softmax|multi_head_attention_forward"
    r"|fractional_max_pool[23]d(_with_indices)?|(uniform|(trunc_)?normal|(xavier|kaiming)_(uniform|normal))_"
    r"|orthogonal_|sparse_|lobpcg|(pca|svd)_lowrank"
)
"""Functions of torch that are written in Python, so that no tag tells that they draw."""


def draws(func: Callable[..., Any]) -> bool:
    """Whether a torch function may draw random numbers: torch tags its operators so."""
    known = _KNOWN.get(func)
    if known is None:
        known = _KNOWN[func] = _draws(func)
    return known


_KNOWN: dict[Callable[..., Any], bool] = {}  # not functools.cache: torch.compile warns where it meets that


def _draws(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if isinstance(func, FunctionType):
        return _PYTHON_FUNCTIONS_THAT_DRAW.fullmatch(name) is not None
    if isinstance(func, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in func.tags
    operator = func if isinstance(func, torch._ops.OpOverloadPacket) else getattr(torch.ops.aten, name, None)
    if not isinstance(operator, torch._ops.OpOverloadPacket):
        return False
    overloads = (getattr(operator, overload) for overload in operator.overloads())
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _is_quiet(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call draws nothing after all, since its dropout is off: then it need not take turns."""
    if isinstance(func, FunctionType):
        if func not in _SIGNATURES:
            _SIGNATURES[func] = inspect.signature(func)
        bound = _SIGNATURES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        return given.get("training") is False or given.get("p", given.get("dropout_p")) == 0
    match func.__name__:
        case "scaled_dot_product_attention":
            return not (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
        case "lstm" | "gru" | "rnn_tanh" | "rnn_relu":
            is_packed = not isinstance(args[3], bool)
            dropout, training = args[6:8] if is_packed else args[5:7]
            return not (dropout and training)
    return False


_SIGNATURES: dict[Callable[..., Any], inspect.Signature] = {}


_RANDOM_MODULES = (
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.RReLU,
)
"""They draw in training alone. Without a stream torch takes its fast path for attention in evaluation."""

_ALWAYS_RANDOM_MODULES = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def never_draws(modules: Iterable[nn.Module]) -> bool:
    """Whether modules surely draw nothing, so that they can run without a stream and its small cost.

    Sure of are torch's own layers but the random ones. Of other people's modules and of hooks nobody knows.
    """
    return all(
        is_plain(module)
        and not isinstance(module, _ALWAYS_RANDOM_MODULES)
        and not (module.training and isinstance(module, _RANDOM_MODULES))
        for module in modules
    )


def is_plain(module: nn.Module) -> bool:
    """Whether a module is one of torch's own and does what torch wrote: no hook, no other forward method."""
    everywhere = nn.modules.module
    return type(module).__module__.startswith("torch.nn.modules.") and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or "forward" in vars(module)
    )
