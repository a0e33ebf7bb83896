"""A model is a model: what people do to an ``nn.Module`` works on a pipeline, or says why not."""

import copy
import io
import warnings
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipe_lite import GPipe, is_recomputing

CHECKPOINTS = ["always", "except_last", "never"]


def pipeline(model, balance, chunks=3, **options):
    return GPipe(model, balance, devices=["cpu"] * len(balance), chunks=chunks, **options)


def mlp(width=4):
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def assert_same_gradients(one, other):
    """To 1e-10; where one has none, so has the other."""
    one, other = gradients(one), gradients(other)
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name] is None) == (other[name] is None), name
        if one[name] is not None:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-10)


# Gradients


def test_a_hook_on_a_parameter_fires_once_with_the_whole_gradient():
    """A nonlinear hook on a micro-batch's gradient would give something else."""
    plain = mlp().double()
    pipe = pipeline(copy.deepcopy(plain), [2, 3])
    x = torch.randn(7, 3).double()
    for run in ("backward", "step"):
        for module in (plain, pipe):
            module.zero_grad()
            calls = []
            handles = [
                p.register_hook(lambda g, calls=calls: (calls.append(1), g.clamp(-0.01, 0.01))[1])
                for p in module.parameters()
            ]
            if run == "step" and module is pipe:
                pipe.step(x, torch.zeros(7, 2).double(), functional.mse_loss)
            else:
                functional.mse_loss(module(x), torch.zeros(7, 2).double()).backward()
            assert len(calls) == 6
            for handle in handles:
                handle.remove()
        assert_same_gradients(plain, pipe)


@pytest.mark.parametrize("run", ["backward", "step"])
def test_an_optimiser_inside_backward_steps_once(run):
    """Through ``register_post_accumulate_grad_hook``, which frees each gradient as soon as it was used."""
    plain = mlp().double()
    pipe = pipeline(copy.deepcopy(plain), [2, 3], checkpoint="always")
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()

    def update(parameter):
        parameter.data.sub_(0.1 * parameter.grad)
        parameter.grad = None

    for module in (plain, pipe):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        if run == "step" and module is pipe:
            pipe.step(x, y, functional.mse_loss)
        else:
            functional.mse_loss(module(x), y).backward()
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is None
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=0, atol=1e-10)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_autograd_grad_gives_gradients_of_inputs_and_of_parameters(checkpoint):
    """And adds nothing to ``.grad``."""
    plain = mlp().double()
    pipe = pipeline(copy.deepcopy(plain), [1, 2, 2], checkpoint=checkpoint)
    x = torch.randn(5, 3).double().requires_grad_()
    found = []
    for module in (plain, pipe):
        parameters = list(module.parameters())
        (of_input,) = torch.autograd.grad(module(x).pow(2).sum(), [x])
        of_parameters = torch.autograd.grad(module(x).pow(2).sum(), parameters[2:4])
        both = torch.autograd.grad(module(x).pow(2).sum(), [parameters[0], x])
        assert x.grad is None
        assert all(p.grad is None for p in parameters)
        found.append((of_input, *of_parameters, *both))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)


def test_gradients_of_gradients_are_refused_in_a_sentence():
    """The stages cut the graph; a silent zero would be worse."""
    x = torch.randn(4, 3, requires_grad=True)
    output = pipeline(mlp(), [2, 3])(x)
    with pytest.raises(RuntimeError, match="create_graph=True, and gradients of gradients cannot pass"):
        torch.autograd.grad(output.sum(), [x], create_graph=True)


@pytest.mark.parametrize("balance", [[5], [2, 3]])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's jvp uses it
def test_other_ways_to_differentiate_are_refused_in_a_sentence(balance):
    """Transforms of torch.func and forward mode would lose the graph; Jacobians by rows are right."""
    pipe, x = pipeline(mlp(), balance), torch.randn(4, 3)
    for transform in (torch.func.grad(lambda x: pipe(x).sum()), lambda x: torch.func.jvp(pipe, (x,), (x,))):
        with pytest.raises(RuntimeError, match=r"torch\.func's (grad|jvp) cannot look into a pipeline"):
            transform(x)
    with pytest.raises(RuntimeError, match=r"torch\.func's vmap cannot look into"):
        torch.vmap(pipe)(torch.stack([x, x]))
    with forward_ad.dual_level():
        assert pipe(x).shape == (4, 2)
        dual = forward_ad.make_dual(x, x)
        for call in (pipe, lambda x: pipe.step(x, torch.zeros(4, 2), functional.mse_loss)):
            with pytest.raises(RuntimeError, match="forward-mode tangents cannot pass"):
                call(dual)
    by_rows = torch.autograd.functional.jacobian(lambda x: pipe(x).sum(0), x)
    torch.testing.assert_close(by_rows, torch.autograd.functional.jacobian(lambda x: nn.Sequential(*pipe)(x).sum(0), x))


@pytest.mark.parametrize("balance", [[5], [2, 3]])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_around_a_pipe_gives_the_right_gradients(balance, checkpoint, reentrant):
    """Though there is nothing for it to save."""
    plain = mlp().double()
    pipe = pipeline(copy.deepcopy(plain), balance, checkpoint=checkpoint)
    x = torch.randn(4, 3).double().requires_grad_()
    for module in (plain, pipe):
        torch_checkpoint(module, x, use_reentrant=reentrant).pow(2).sum().backward()
    assert_same_gradients(plain, pipe)


def test_gradients_of_backward_calls_and_steps_add_up():
    """As in plain torch, until they are set to zero; also when a frozen part is unfrozen in between."""
    plain = mlp().double()
    pipe = pipeline(copy.deepcopy(plain), [2, 3])
    for module in (plain, pipe):
        module[0].requires_grad_(False)
    for i in range(4):
        x, y = torch.randn(4 + i, 3).double(), torch.randn(4 + i, 2).double()
        functional.mse_loss(plain(x), y).backward()
        if i % 2:
            pipe.step(x, y, functional.mse_loss)
        else:
            functional.mse_loss(pipe(x), y).backward()
        assert_same_gradients(plain, pipe)
        for module in (plain, pipe):
            module.requires_grad_(True)
    pipe.zero_grad()
    assert all(p.grad is None for p in pipe.parameters())


def test_an_embeddings_sparse_gradient_equals_the_dense_one():
    """Summed over micro-batches it stays sparse."""
    for sparse_last in (False, True):
        embedding = nn.Embedding(10, 4, sparse=True).double()
        plain = nn.Sequential(embedding, nn.Linear(4, 2).double())
        pipe = pipeline(copy.deepcopy(plain), [1, 1], chunks=4)
        x = torch.randint(10, (9, 3))
        for module in (plain, pipe):
            module(x).pow(2).sum().backward()
            if sparse_last:
                module(x).sum().backward()
        assert pipe[0].weight.grad.is_sparse
        torch.testing.assert_close(pipe[0].weight.grad.to_dense(), plain[0].weight.grad.to_dense(), rtol=0, atol=1e-10)


def test_two_parameters_that_autograd_gives_one_gradient_do_not_share_its_sum():
    """For ``a + b`` autograd returns the same tensor twice; adding to it in place would count double."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3).double()), nn.Parameter(torch.zeros(3).double())

        def forward(self, x):
            return x * (self.a + self.b)

    plain = nn.Sequential(Sum(), Sum())
    pipe = pipeline(copy.deepcopy(plain), [1, 1], chunks=5)
    x = torch.randn(5, 3).double()
    for module in (plain, pipe):
        for p in module.parameters():
            p.data.fill_(0.7)
        module(x).sum().backward()
    assert_same_gradients(plain, pipe)


def test_tied_weights_on_two_stages_have_the_same_bits_in_every_run():
    """The stages' sums are added in the stages' order, whichever comes first."""

    class Head(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return x @ self.weight.T

    torch.manual_seed(0)
    embedding = nn.Embedding(20, 16)
    plain = nn.Sequential(embedding, nn.Linear(16, 16), nn.Tanh(), Head(embedding.weight))
    pipe = pipeline(plain, [1, 1, 1, 1], chunks=4)
    x, y = torch.randint(20, (8, 5)), torch.randint(20, (8, 5))

    def loss_fn(output, target):
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    loss_fn(plain(x), y).backward()
    expected, runs = plain[0].weight.grad.clone(), []
    for _ in range(20):
        pipe.zero_grad()
        pipe.step(x, y, loss_fn)
        runs.append(plain[0].weight.grad)
    torch.testing.assert_close(runs[0], expected)
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_a_tensor_from_outside_that_requires_grad_is_refused():
    """Its gradient would be lost, since a stage hands on those of its input and its parameters alone."""

    class Scale(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = [by]

        def forward(self, x):
            return x * self.by[0]

    outside = torch.ones(3, requires_grad=True)
    for by in (outside, outside * 2):
        pipe = pipeline(nn.Sequential(nn.Linear(3, 3), Scale(by)), [1, 1])
        with pytest.raises(RuntimeError, match=r"tensor of shape \(3,\) that requires grad and is not a parameter"):
            pipe(torch.randn(4, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="or the loss function, uses a tensor of shape"):
        pipeline(mlp(), [5]).step(torch.randn(4, 3), torch.randn(4, 3), lambda o, t: (o.sum() * outside).sum())


def test_a_loss_functions_own_parameters_get_their_gradients():
    """When it is a module, as those with learnt class centres or temperatures."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.3, 0.7]).double())

        def forward(self, output, target):
            return ((output - target).pow(2) * self.weight).mean()

    plain, own = mlp().double(), Loss()
    pipe, its = pipeline(copy.deepcopy(plain), [2, 3]), copy.deepcopy(own)
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    own(plain(x), y).backward()
    pipe.step(x, y, its)
    assert_same_gradients(plain, pipe)
    assert_same_gradients(own, its)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_loss_functions_parts_and_state_are_the_last_stages(checkpoint):
    """Its dropout, its running statistics and its modes, too, are the same for a recomputation."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.dropout = nn.BatchNorm1d(2), nn.Dropout(0.5)
            self.register_buffer("centre", torch.zeros(2))

        def forward(self, output, target):
            with torch.no_grad():
                self.centre = 0.5 * self.centre + output.mean(0)
            return (self.dropout(self.norm(output)) - target - self.centre).pow(2).mean()

    torch.manual_seed(0)
    model, loss_fn = mlp().double(), Loss().double()
    x, y, found = torch.randn(8, 3).double(), torch.randn(8, 2).double(), []
    for mode in ("never", checkpoint):
        pipe, its = pipeline(copy.deepcopy(model), [2, 3], checkpoint=mode), copy.deepcopy(loss_fn)
        torch.manual_seed(1)
        pipe.step(x, y, its)
        found.append([*(p.grad for p in (*pipe.parameters(), *its.parameters())), *its.buffers()])
    assert its.norm.num_batches_tracked == pipe.chunks
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_parameter_that_is_used_past_its_own_stage_gets_its_whole_gradient(schedule, checkpoint):
    """By another stage's layer that holds it in a list, and by a penalty in the loss on all weights."""

    class Decoder(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = [weight]

        def forward(self, x):
            return x @ self.weight[0]

    def build():
        torch.manual_seed(0)
        encoder = nn.Linear(3, 4)
        return nn.Sequential(encoder, nn.Tanh(), Decoder(encoder.weight), nn.Linear(3, 2)).double()

    plain, pipe = build(), pipeline(build(), [1, 1, 2], checkpoint=checkpoint, schedule=schedule)
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()

    def loss_of(model):
        return lambda output, target: (output - target).pow(2).mean() + sum(p.pow(2).sum() for p in model.parameters())

    for module, run in ((plain, lambda: loss_of(plain)(plain(x), y).backward()),
                        (pipe, lambda: pipe.step(x, y, loss_of(pipe)))):  # fmt: skip
        for _ in range(2):
            run()
        assert module[0].weight.grad is not None
    assert_same_gradients(plain, pipe)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_gradient_that_would_leave_the_pipeline_unnoticed_is_refused(checkpoint):
    """An auxiliary loss that a layer kept reaches this stage alone: the stages before would get a part."""

    class Keeps(nn.Module):
        def forward(self, x):
            self.kept = x.pow(2).mean()
            return torch.tanh(x)

    keeps = Keeps()
    pipe = pipeline(nn.Sequential(nn.Linear(3, 3), keeps, nn.Linear(3, 2)), [1, 2], checkpoint=checkpoint)
    x = torch.randn(6, 3)
    with pytest.raises(RuntimeError, match=r"the input of stage 1, of shape \(2, 3\), past the pipeline"):
        (pipe(x).sum() + keeps.kept).backward()
    pipe.step(x, torch.randn(6, 2), functional.mse_loss)
    with pytest.raises(RuntimeError, match="something kept an activation, such as a loss on a layer"):
        keeps.kept.backward()


def test_an_output_requires_grad_if_it_does_in_any_micro_batch():
    """A layer may take another way for another micro-batch."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return x if x[0, 0] > 0 else self.linear(x)

    x = torch.randn(6, 3)
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    plain = nn.Sequential(Sometimes(), nn.Identity())
    pipe = pipeline(copy.deepcopy(plain), [1, 1])
    pipe(x).sum().backward()
    plain[0].linear(x[2:]).sum().backward()
    torch.testing.assert_close(pipe[0].linear.weight.grad, plain[0].linear.weight.grad)
    pipe.zero_grad()
    pipe.step(x, torch.zeros(6), lambda output, _: output.sum() / len(output))
    torch.testing.assert_close(pipe[0].linear.weight.grad, plain[0].linear.weight.grad / 6)


# What hangs on layers


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_hooks_on_layers_fire_once_a_micro_batch(checkpoint):
    """Forward hooks again in a recomputation, which is_recomputing tells; backward hooks never twice."""
    pipe = pipeline(mlp(), [2, 3], chunks=4, checkpoint=checkpoint)
    seen = {"forward": 0, "again": 0, "backward": 0, "pre": 0, "pipe": 0}

    def note(kind, *_):
        if not is_recomputing():
            seen[kind] += 1
        else:
            seen["again"] += kind == "forward"

    pipe[2].register_forward_hook(partial(note, "forward"))
    pipe[2].register_forward_pre_hook(partial(note, "pre"))
    pipe[2].register_full_backward_hook(partial(note, "backward"))
    pipe.register_forward_hook(partial(note, "pipe"))
    pipe(torch.randn(8, 3)).sum().backward()
    again = {"always": 4, "except_last": 3, "never": 0}[checkpoint]
    assert seen == {"forward": 4, "again": again, "backward": 4, "pre": 4, "pipe": 1}
    assert not is_recomputing()


def test_a_hook_that_changes_the_output_does_so_in_a_recomputation_too():
    """It is part of what the layer computes."""
    plain = mlp().double()
    plain[1].register_forward_hook(lambda _, __, output: output * 3)
    x = torch.randn(4, 3).double()
    pipe = pipeline(copy.deepcopy(plain), [3, 2], checkpoint="always")
    for module in (plain, pipe):
        module(x).pow(2).sum().backward()
    assert_same_gradients(plain, pipe)


class Adapted(nn.Module):
    """A layer with a low-rank correction, as LoRA puts around frozen ones."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False).to(layer.weight)
        self.up = nn.Linear(rank, layer.out_features, bias=False).to(layer.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize(
    "wrap",
    [parametrizations.weight_norm, nn.utils.weight_norm, parametrizations.orthogonal, Adapted],
    ids=["weight_norm", "old weight_norm", "orthogonal", "adapter"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")  # people use it still
def test_parametrised_layers_train_as_in_the_unsplit_model(wrap, checkpoint):
    """On a stage of their own and in one with others."""
    plain, other = mlp().double(), mlp().double()
    for module in (plain, other):
        torch.manual_seed(0)
        for i in (0, 2, 4):
            module[i] = wrap(module[i])
    other.load_state_dict(plain.state_dict())
    pipe = pipeline(other, [1, 3, 1], checkpoint=checkpoint)
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    functional.mse_loss(plain(x), y).backward()
    pipe.step(x, y, functional.mse_loss)
    assert_same_gradients(plain, pipe)


def test_a_layer_that_is_replaced_is_used():
    """Tools that put adapters around layers do so after the pipe was built."""
    pipe = pipeline(mlp().double(), [2, 3])
    pipe.requires_grad_(False)
    setattr(pipe, "2", Adapted(pipe[2]))
    assert pipe.partitions[1][0] is pipe[2]
    pipe(torch.randn(4, 3).double()).sum().backward()
    assert pipe[2].up.weight.grad is not None
    pipe.add_module("5", nn.ReLU())
    with pytest.raises(RuntimeError, match=r"has 6 layers, and its balance \[2, 3\] is for 5"):
        pipe(torch.randn(4, 3).double())


# State


def test_weights_load_from_and_into_any_number_of_stages():
    """And none: the keys are the model's."""
    plain = mlp()
    weights = plain.state_dict()
    for balance in ([5], [2, 3], [1] * 5):
        pipe = pipeline(mlp(), balance)
        assert pipe.load_state_dict(weights).missing_keys == []
        weights = pipe.state_dict()
    other = mlp()
    other.load_state_dict(weights)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))


def test_a_saved_pipe_is_the_same_after_loading():
    """``torch.save`` of the whole object, before and after steps; only trusted files are loaded so."""
    pipe = pipeline(mlp(), [2, 3])
    x = torch.randn(5, 3)
    for _ in range(2):
        file = io.BytesIO()
        torch.save(pipe, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
        assert torch.equal(other(x), pipe(x))
        assert (other.balance, other.devices, other.chunks) == (pipe.balance, pipe.devices, pipe.chunks)
        pipe(x).sum().backward()


def test_clipping_groups_averages_and_apply_work():
    """Parameter groups, norms over all stages, an averaged copy, an initialisation through apply."""
    plain = mlp().double()
    pipe = pipeline(copy.deepcopy(plain), [2, 3])
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    averaged = torch.optim.swa_utils.AveragedModel(pipe)
    for module in (plain, pipe):
        module.apply(lambda m: nn.init.constant_(m.bias, 0.3) if isinstance(m, nn.Linear) else None)
        groups = [{"params": module[0].parameters(), "lr": 0.3}, {"params": module[4].parameters(), "lr": 0.1}]
        optimizer = torch.optim.AdamW(groups)
        for _ in range(3):
            optimizer.zero_grad()
            functional.mse_loss(module(x), y).backward()
            assert nn.utils.clip_grad_norm_(module.parameters(), 0.05) > 0.05
            optimizer.step()
    averaged.update_parameters(pipe)
    for a, b, c in zip(plain.parameters(), pipe.parameters(), averaged.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
        assert torch.equal(b, c)
        assert b is not c


def test_a_pipe_changes_its_dtype_and_not_its_devices():
    """Moving it would put all partitions on one device."""
    pipe = pipeline(mlp(), [2, 3])
    assert pipe.double() is pipe
    assert pipe(torch.randn(4, 3).double()).dtype == torch.float64
    assert pipe.to(torch.bfloat16)[4].weight.dtype == torch.bfloat16
    pipe.cpu()
    for move in (lambda: pipe.to("meta"), lambda: pipe.to_empty(device="meta")):
        with pytest.raises(TypeError, match="stage 0 of the pipeline lives on cpu, and this would move it to meta"):
            move()
    assert {p.device.type for p in pipe.parameters()} == {"cpu"}


# Between forward and backward


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_mode_of_the_forward_pass_counts(checkpoint):
    """``eval()`` before ``backward()`` changes nothing of what was computed; a layer's own mode counts, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    pipe = pipeline(model, [2, 3], checkpoint=checkpoint)
    pipe[3].eval()
    x, found = torch.randn(6, 3), []
    for switch in (False, True):
        pipe.zero_grad()
        torch.manual_seed(1)
        output = pipe(x)
        if switch:
            pipe.eval()
        output.sum().backward()
        assert pipe.training is not switch
        assert pipe[1].training is not switch
        found.append(pipe[0].weight.grad)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_weights_that_changed_before_backward_are_refused(checkpoint):
    """Without recomputation autograd says so, with it we do: never a silently wrong gradient."""
    pipe = pipeline(mlp(), [2, 3], checkpoint=checkpoint)
    output = pipe(torch.randn(6, 3))
    with torch.no_grad():
        pipe[4].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified.*in ?place"):
        output.sum().backward()
    pipe(torch.randn(6, 3)).sum().backward()


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_layer_frozen_before_backward_gets_no_gradient(checkpoint):
    """As in plain torch; ``chunks`` and ``checkpoint``, too, count as they were in the forward pass."""
    plain = mlp().double()
    pipe = pipeline(copy.deepcopy(plain), [2, 3], checkpoint=checkpoint)
    x = torch.randn(6, 3).double()
    for module in (plain, pipe):
        output = module(x)
        module[0].requires_grad_(False)
        pipe.chunks, pipe.checkpoint = 5, "never" if checkpoint == "always" else "always"
        output.pow(2).sum().backward()
        assert module[0].weight.grad is None
        assert module[2].weight.grad is not None
    assert_same_gradients(plain, pipe)


def test_lazy_layers_get_their_shapes_in_the_first_pass():
    """And are trained from the second on, or the first."""
    for checkpoint in CHECKPOINTS:
        pipe = pipeline(nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2)), [2, 1], checkpoint=checkpoint)
        pipe(torch.randn(6, 3)).sum().backward()
        assert pipe[0].weight.grad.shape == (4, 3)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_functional_call_gives_gradients_to_the_parameters_it_was_given(checkpoint):
    """Also where they are recomputed, though the pipe has its own back by then."""
    pipe = pipeline(mlp().double(), [2, 3], checkpoint=checkpoint)
    new = {name: torch.randn_like(p).requires_grad_() for name, p in pipe.named_parameters()}
    x = torch.randn(5, 3).double()
    torch.func.functional_call(pipe, new, (x,)).pow(2).sum().backward()
    plain = mlp().double()
    plain.load_state_dict({name: p.detach() for name, p in new.items()})
    plain(x).pow(2).sum().backward()
    for name, parameter in new.items():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=0, atol=1e-10)
    assert all(p.grad is None for p in pipe.parameters())


# What crosses a boundary


@dataclass
class State:
    """What a user's layers may pass on."""

    x: torch.Tensor
    steps: int


torch.export.register_dataclass(State)


class Mixed(nn.Module):
    """Passes on all kinds of things."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, batch):
        x = self.linear(batch["x"])
        return {
            "state": State(x, 1),
            "mask": batch["x"] > 0,
            "ids": torch.arange(len(x)),
            "none": None,
            "nested": [(x * 2, "word"), {"half": x[:, ::2].mT.contiguous().mT}],
            "unused": x.sin(),
        }


class Unmixed(nn.Module):
    """Takes them up again."""

    def forward(self, batch):
        assert batch["none"] is None
        assert batch["mask"].dtype == torch.bool
        (double, word), rest = batch["nested"]
        assert word == "word"
        out = batch["state"].x.masked_fill(batch["mask"], 0.0) + double + rest["half"].sum(1, keepdim=True)
        return {"out": out * batch["ids"].ge(0)[:, None], "steps": batch["state"].steps + 1}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_any_nesting_of_anything_crosses_a_boundary(checkpoint):
    """Masks, indices, None, words, dataclasses, views; some of it unused, some without gradient."""
    plain = nn.Sequential(Mixed(), nn.Identity(), Unmixed()).double()
    pipe = pipeline(copy.deepcopy(plain), [1, 1, 1], checkpoint=checkpoint)
    x = torch.randn(3, 7).double().mT.requires_grad_()  # not contiguous
    found = []
    for module in (plain, pipe):
        x.grad = None
        output = module({"x": x})
        assert output["steps"] == 2
        output["out"].pow(2).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)
    assert_same_gradients(plain, pipe)


def test_a_layer_that_writes_into_its_input_from_inside_is_explained():
    """Where it stands first on a stage; anywhere else, and with an ``inplace`` attribute, it works."""

    class Inside(nn.Module):
        def forward(self, x):
            return x.tanh_()

    plain = nn.Sequential(nn.Linear(3, 3), Inside(), nn.Linear(3, 3)).double()
    x = torch.randn(4, 3).double()
    plain(x).sum().backward()
    pipe = pipeline(copy.deepcopy(plain), [2, 1])
    pipe.zero_grad()
    pipe(x).sum().backward()
    assert_same_gradients(plain, pipe)
    with pytest.raises(RuntimeError, match="leaf Variable") as raised:
        pipeline(copy.deepcopy(plain), [1, 2])(x)
    assert "a layer writes into it: let it write elsewhere" in "".join(raised.value.__notes__)


def test_a_batch_is_not_written_to_by_a_first_layer_that_works_in_place():
    """The plain model's would be; the pipe's first layer works on a copy, with and without gradients."""
    pipe = pipeline(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3), nn.ReLU(inplace=True)), [1, 2])
    x = torch.randn(6, 3)
    before = x.clone()
    pipe(x)
    with torch.no_grad():
        pipe(x)
    assert torch.equal(x, before)


def test_an_output_may_have_several_rows_a_sample_or_none_for_the_only_micro_batch():
    """Gradients go back to whom they belong."""

    class Rows(nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.shape = shape

        def forward(self, x):
            return x.sum() if self.shape is None else x.reshape(self.shape)

    x = torch.randn(7, 4).double()
    for shape, chunks in (((-1, 2), 3), (None, 1), ((2, -1), 1)):
        plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Rows(shape)).double()
        pipe = pipeline(copy.deepcopy(plain), [1, 2], chunks=chunks)
        weights = torch.randn(plain(x).shape).double()
        for module in (plain, pipe):
            (module(x).pow(2) * weights).sum().backward()
        assert_same_gradients(plain, pipe)
    with pytest.raises(ValueError, match="joined along the first axis, so let that be of samples"):
        pipeline(nn.Sequential(nn.Linear(4, 4), Rows((2, -1))), [1, 1])(torch.randn(7, 4))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_weight_that_is_computed_once_and_cached_is_explained(schedule):
    """All micro-batches would share its graph; torch's own error gets a note that says so."""
    model = nn.Sequential(nn.Linear(3, 3), parametrizations.weight_norm(nn.Linear(3, 3)))
    pipe = pipeline(model, [1, 1], schedule=schedule)
    with parametrize.cached():
        _ = model[1].weight
        with pytest.raises(RuntimeError, match="a second time") as raised:
            pipe.step(torch.randn(6, 3), torch.randn(6, 3), functional.mse_loss)
    assert "a weight computed before the forward pass and cached" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_hook_that_a_layer_puts_on_its_input_fires_once(checkpoint):
    """As where gradients are reversed, or clipped, inside a layer; where it stands makes no difference."""

    class Reverse(nn.Module):
        def forward(self, x):
            if x.requires_grad:
                x.register_hook(lambda gradient: -3 * gradient)
            return x * 1.0

    plain = nn.Sequential(nn.Linear(3, 3), Reverse(), nn.Linear(3, 3)).double()
    x = torch.randn(6, 3).double()
    plain(x).pow(2).sum().backward()
    for balance in ([1, 2], [2, 1], [3]):
        pipe = pipeline(copy.deepcopy(plain), balance, checkpoint=checkpoint)
        pipe.zero_grad()
        output = pipe(x).pow(2).sum()
        output.backward(retain_graph=True)
        assert_same_gradients(plain, pipe)
        pipe.zero_grad()
        output.backward()
        assert_same_gradients(plain, pipe)
        pipe.zero_grad()
        pipe.step(x, x, lambda output, _: output.pow(2).mean(), scale=lambda seed: seed * x.numel())
        assert_same_gradients(plain, pipe)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("inside_step", [False, True])
def test_a_parameter_that_forward_makes_or_unfreezes_gets_its_gradient(inside_step, checkpoint):
    """In that very pass, with a hook that is put there too, which fires once."""

    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3).requires_grad_(False)

        def forward(self, x):
            if not hasattr(self, "weight"):
                self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
                self.weight.register_hook(lambda gradient: 2 * gradient)
                self.linear.requires_grad_(True)
            return self.linear(x) * self.weight

    plain = nn.Sequential(nn.Linear(3, 3), Grows(), nn.Linear(3, 3)).double()
    pipe = pipeline(copy.deepcopy(plain), [1, 2], checkpoint=checkpoint)
    x = torch.randn(6, 3).double()
    plain(x).pow(2).mean().backward()
    if inside_step:
        pipe.step(x, x, lambda output, _: output.pow(2).mean())
    else:
        pipe(x).pow(2).mean().backward()
    assert pipe[1].weight.grad is not None
    assert_same_gradients(plain, pipe)


@pytest.mark.parametrize("balance", [[1, 1], [2]])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize(
    "derive",
    [
        lambda w: {"0.weight": w["0.weight"] * 1, "1.weight": w["0.weight"].t()},
        lambda w: {name: p * 0.5 for name, p in w.items()},
        lambda w: {name: p - 0.1 * p.sin() for name, p in w.items()},
        lambda w: {"0.weight": w["0.weight"] * 2, "1.weight": w["0.weight"] * 3},
    ],
)
def test_weights_that_are_computed_from_others_pass_their_gradients_on(derive, checkpoint, balance):
    """As fast weights in meta-learning, and tied ones; each gradient counts once."""
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    x, found = torch.randn(6, 3).double(), []
    for module in (plain, pipeline(copy.deepcopy(plain), balance, checkpoint=checkpoint)):
        own = dict(module.named_parameters())
        torch.func.functional_call(module, derive(own), (x,)).pow(2).sum().backward()
        found.append({name: p.grad for name, p in own.items()})
    for name, gradient in found[0].items():
        assert (gradient is None) == (found[1][name] is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, found[1][name], rtol=0, atol=1e-10, msg=name)


def test_a_weight_that_is_computed_from_another_on_its_stage_is_refused():
    """The one's gradient goes on to the other, which has its own already."""
    pipe = pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [2])
    own = dict(pipe.named_parameters())
    output = torch.func.functional_call(pipe, {"1.weight": own["0.weight"].t()}, (torch.randn(6, 3),))
    with pytest.raises(RuntimeError, match=r"on stage 0, of shape \(3, 3\), is computed from another there"):
        output.sum().backward()


def test_gradients_of_many_outputs_at_once_are_refused_in_a_sentence():
    """One at a time they work."""
    for chunks in (1, 2, 3):
        pipe = pipeline(mlp(), [2, 3], chunks=chunks)
        x = torch.randn(3, 3, requires_grad=True)
        output = pipe(x)
        with pytest.raises(RuntimeError, match="many gradients at once"):
            torch.autograd.grad(output, x, torch.eye(6).view(6, 3, 2), is_grads_batched=True)


def test_a_slice_of_a_pipe_is_a_sequential():
    """As a slice of the model is, with the same layers and names."""
    pipe = pipeline(mlp(), [2, 3])
    part = pipe[1:3]
    assert isinstance(part, nn.Sequential)
    assert list(part) == [pipe[1], pipe[2]]


def test_a_layer_may_have_any_name_but_those_of_the_pipe():
    """Also those that the pipe keeps for itself are refused, not overwritten."""
    for name in ("_workers", "_timeline", "_plans", "chunks", "devices"):
        model = nn.Sequential()
        model.add_module(name, nn.Linear(2, 2))
        with pytest.raises(ValueError, match=f"layer '{name}' has the name of an attribute of GPipe"):
            pipeline(model, [1])


# Random numbers, compilers, settings


def test_attention_in_evaluation_takes_the_way_that_it_takes_in_the_plain_model():
    """Torch has a fast one, which writes zeros where keys are padded."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), nn.Linear(8, 3)).eval()
    x = torch.randn(4, 5, 8)
    pipe = pipeline(copy.deepcopy(plain), [2], chunks=2)  # in this thread, the one that is profiled
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        expected = plain(x)
        found = pipe(x)
        pipe.step(x, found, functional.mse_loss)
    torch.testing.assert_close(found, expected)
    calls = {event.key: event.count for event in profiled.key_averages()}
    assert calls["aten::_transformer_encoder_layer_fwd"] == 1 + 2 + 2


def test_dropout_inside_torchs_own_checkpoint_is_refused():
    """Its recomputation would draw other numbers, silently; without random numbers it works."""

    class Nested(nn.Module):
        def __init__(self, dropout, reentrant):
            super().__init__()
            self.inner, self.reentrant = nn.Sequential(nn.Linear(3, 3), nn.Dropout(dropout)), reentrant

        def forward(self, x):
            return torch_checkpoint(self.inner, x, use_reentrant=self.reentrant)

    for reentrant in (False, True):
        pipe = pipeline(nn.Sequential(nn.Linear(3, 3), Nested(0.5, reentrant)), [1, 1])
        with pytest.raises(RuntimeError, match=r"inside torch\.utils\.checkpoint, whose own recomputation"):
            pipe(torch.randn(4, 3))
    plain = nn.Sequential(nn.Linear(3, 3), Nested(0.0, reentrant=False)).double()
    x = torch.randn(4, 3).double()
    for checkpoint in CHECKPOINTS:
        pipe = pipeline(copy.deepcopy(plain), [1, 1], checkpoint=checkpoint)
        plain.zero_grad()
        for module in (plain, pipe):
            module(x).pow(2).sum().backward()
        assert_same_gradients(plain, pipe)


def test_a_generator_of_a_layers_own_is_refused_where_it_is_recomputed():
    """It cannot be had back; where nothing is recomputed it may be used."""

    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn(x.shape, generator=GENERATOR)

    for checkpoint in ("always", "except_last"):
        with pytest.raises(RuntimeError, match=r"draws from a torch\.Generator of the layer's own"):
            pipeline(nn.Sequential(nn.Linear(3, 3), Noise()), [1, 1], checkpoint=checkpoint)(torch.randn(4, 3))
    pipeline(nn.Sequential(nn.Linear(3, 3), Noise()), [1, 1], checkpoint="never")(torch.randn(4, 3)).sum().backward()


GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own, which it means to hide
def test_compiled_layers_give_the_same_bits_as_they_do_uncompiled(checkpoint):
    """Dropout among them; a compiled pipe runs as it is."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5)), nn.Linear(8, 2)]
    x, found = torch.randn(6, 3), []
    for kind in ("plain", "layers", "in place", "pipe"):
        model = copy.deepcopy(nn.Sequential(*layers))
        first = model[0]
        if kind == "layers":
            model[0] = torch.compile(first, backend="aot_eager")
        if kind == "in place":
            first.compile(backend="aot_eager")
        pipe = pipeline(model, [1, 1], checkpoint=checkpoint)
        call = torch.compile(pipe, backend="aot_eager") if kind == "pipe" else pipe
        torch.manual_seed(1)
        output = call(x)
        output.sum().backward()
        found.append((output.detach(), first[0].weight.grad))
    for output, gradient in found[1:]:
        torch.testing.assert_close(output, found[0][0])
        torch.testing.assert_close(gradient, found[0][1])


@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_the_callers_settings_reach_every_stage(balance):
    """Default dtype and device, and hooks on what autograd saves."""
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append((torch.empty(0).dtype, torch.empty(0).device.type))
            return x.sin()

    pipe = pipeline(nn.Sequential(Spy(), Spy()), balance, chunks=1)
    x = torch.randn(2, 2, requires_grad=True)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            pipe(x)
    finally:
        torch.set_default_dtype(torch.float32)
    pipe(x)
    assert seen == [(torch.float64, "meta")] * 2 + [(torch.float32, "cpu")] * 2
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        pipe(x).sum().backward()
    assert len(packed) == 2


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_under_autocast_a_recomputation_computes_in_the_same_dtype(checkpoint):
    """Gradients equal the unsplit model's under the same autocast, to its rounding."""
    plain = mlp(16)
    pipe = pipeline(copy.deepcopy(plain), [2, 3], chunks=1, checkpoint=checkpoint)
    x = torch.randn(6, 3)
    for module in (plain, pipe):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=module is plain):
            output = module(x)
        assert output.dtype == torch.bfloat16
        output.float().pow(2).sum().backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(pipe)[name], gradient, rtol=0.02, atol=0.02)


def test_a_gradient_scaler_scales_gradients_and_not_the_loss():
    """As torch's recipe for fp16 has it: scale, unscale, step, update."""
    plain = mlp().double()
    pipe = pipeline(copy.deepcopy(plain), [2, 3])
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    loss = pipe.step(x, y, functional.mse_loss, scale=scaler.scale).loss
    expected = functional.mse_loss(plain(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(pipe[0].weight.grad, 1024 * plain[0].weight.grad, rtol=0, atol=1e-7)
    scaler.unscale_(optimizer)
    assert_same_gradients(plain, pipe)
    scaler.step(optimizer)
    scaler.update()


def test_batch_norm_without_deferral_is_explained_once():
    """In training, over several micro-batches."""
    pipe = pipeline(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), [1, 1])
    pipe.eval()(torch.randn(6, 3))
    pipe.train()
    with pytest.warns(UserWarning, match="layer '1' is a BatchNorm.*3 updates a mini-batch"):
        pipe(torch.randn(6, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(torch.randn(6, 3))
        pipeline(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), [1, 1], chunks=1)(torch.randn(6, 3))
