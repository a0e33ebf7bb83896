"""Checkpoints are whole or not there, load on any number of stages, and run no code."""

import copy
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_lite import DistributedGPipe, GPipe, launch
from gpipe_lite.launcher import LaunchError
from gpipe_lite.saving import CheckpointError, load, save


def new(balance=(2, 2), seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
    pipe = GPipe(model, balance, devices=["cpu"] * len(balance), chunks=2, deferred_batch_norm=True)
    return pipe, torch.optim.Adam(pipe.parameters(), lr=0.1)


def train(pipe, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        pipe.step(torch.randn(8, 3), torch.randn(8, 2), functional.mse_loss)
        optimizer.step()


def equal(a, b):
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("balance", [(2, 2), (4,), (1, 1, 1, 1)])
def test_a_resumed_run_is_bit_equal_to_an_undisturbed_one(tmp_path, balance):
    """With dropout, BatchNorm, Adam and random data; also on another number of stages."""
    pipe, optimizer = new()
    train(pipe, optimizer, 3)
    save(tmp_path / "run.pt", pipe, optimizer, step=3, note="halfway")
    train(pipe, optimizer, 3)
    other, other_optimizer = new(balance, seed=99)
    assert load(tmp_path / "run.pt", other, other_optimizer) == {"step": 3, "note": "halfway"}
    train(other, other_optimizer, 3)
    assert equal(pipe.state_dict(), other.state_dict())


def test_a_checkpoint_loads_into_the_plain_model(tmp_path):
    """Its keys are the model's own."""
    pipe, optimizer = new()
    save(tmp_path / "run.pt", pipe, optimizer)
    plain = nn.Sequential(*copy.deepcopy(list(pipe)))
    with torch.no_grad():
        plain[0].weight.zero_()
    load(tmp_path / "run.pt", plain)
    assert equal(plain.state_dict(), pipe.state_dict())


def test_a_crash_while_writing_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    """And nothing beside it."""
    pipe, optimizer = new()
    save(tmp_path / "run.pt", pipe, optimizer, step=1)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("no space left on device")))
    with pytest.raises(OSError, match="no space"):
        save(tmp_path / "run.pt", pipe, optimizer, step=2)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    assert load(tmp_path / "run.pt", pipe, optimizer) == {"step": 1}


def test_a_damaged_file_is_refused_with_its_name(tmp_path):
    """Cut to any length, or with other bytes in it; the model is left as it was."""
    pipe, optimizer = new()
    file = tmp_path / "run.pt"
    save(file, pipe, optimizer)
    content = file.read_bytes()
    before = copy.deepcopy(pipe.state_dict())
    for length in (0, 1, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"run\.pt is damaged, or holds more"):
            load(file, pipe, optimizer)
    weights = pipe[0].weight.detach().numpy().tobytes()
    file.write_bytes(content.replace(weights, weights[::-1]))
    with pytest.raises(CheckpointError, match=r"its part .* is damaged"):
        load(file, pipe, optimizer)
    assert equal(before, pipe.state_dict())


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_code_in_a_file_is_not_run(tmp_path, monkeypatch):
    """Neither from a pickle, nor from one in torch's archive."""
    monkeypatch.chdir(tmp_path)
    pipe, optimizer = new()
    Path("evil.pt").write_bytes(pickle.dumps(Evil()))
    torch.save({"format": Evil()}, "evil_zip.pt")
    for name in ("evil.pt", "evil_zip.pt"):
        with pytest.raises(CheckpointError, match=name) as raised:
            load(name, pipe, optimizer)
        assert "weights_only" not in str(raised.value)
    assert not Path("executed").exists()


def test_foreign_files_are_refused(tmp_path):
    """Text, another archive, another program's state, another version."""
    pipe, optimizer = new()
    (tmp_path / "text").write_text("hello")
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("a", "b")
    for name in ("text", "zip"):
        with pytest.raises(CheckpointError, match="is damaged, or holds more than tensors and plain values"):
            load(tmp_path / name, pipe, optimizer)
    torch.save([1, 2], tmp_path / "list")
    torch.save({"format": "gpipe_lite checkpoint 0"}, tmp_path / "old")
    for name, found in (("list", "a list"), ("old", "checkpoint 0")):
        with pytest.raises(CheckpointError, match=f"not a whole checkpoint of this version: it has '.*{found}"):
            load(tmp_path / name, pipe, optimizer)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load(tmp_path / "absent", pipe, optimizer)


def test_another_models_checkpoint_is_refused_by_its_first_difference(tmp_path):
    """A key, or a shape; and an optimiser of other groups."""
    pipe, optimizer = new()
    save(tmp_path / "run.pt", pipe, optimizer)
    wider = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 2))
    with pytest.raises(CheckpointError, match=r"'0.weight' has shape \(6, 3\) in the file and \(7, 3\) in the model"):
        load(tmp_path / "run.pt", wider)
    shorter, longer = nn.Sequential(nn.Linear(3, 6)), nn.Sequential(*pipe, nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"7 keys are only in the file, the first is '1.weight'"):
        load(tmp_path / "run.pt", shorter)
    with pytest.raises(CheckpointError, match=r"2 keys are only in the model, the first is '4.weight'"):
        load(tmp_path / "run.pt", longer)
    frozen = torch.optim.Adam([pipe[0].weight])
    with pytest.raises(CheckpointError, match=r"groups of \[6\] parameters, this is Adam with \[1\]"):
        load(tmp_path / "run.pt", pipe, frozen)
    other_kind = torch.optim.SGD(pipe.parameters())
    with pytest.raises(CheckpointError, match=r"state of Adam .*, this is SGD"):
        load(tmp_path / "run.pt", pipe, other_kind)


def test_what_could_not_be_loaded_does_not_replace_what_can(tmp_path):
    """A Path is no plain value."""
    pipe, optimizer = new()
    save(tmp_path / "run.pt", pipe, optimizer, step=1)
    with pytest.raises(CheckpointError, match=r"it refers to pathlib"):
        save(tmp_path / "run.pt", pipe, optimizer, folder=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    assert load(tmp_path / "run.pt", pipe, optimizer) == {"step": 1}


def test_a_link_stays_a_link(tmp_path):
    """What it points to is replaced."""
    pipe, optimizer = new()
    (tmp_path / "link.pt").symlink_to(tmp_path / "run.pt")
    save(tmp_path / "link.pt", pipe, optimizer)
    assert (tmp_path / "link.pt").is_symlink()
    assert load(tmp_path / "run.pt", pipe, optimizer) == {}


def test_what_cannot_be_written_is_refused_in_a_sentence(tmp_path):
    """A function of one's own cannot be pickled at all; a number of NumPy's would not be read back."""
    pipe, optimizer = new()
    for value in (lambda: 0, np.float64(3)):
        with pytest.raises(CheckpointError, match=r"run\.pt (cannot keep this|would hold what cannot be read back)"):
            save(tmp_path / "run.pt", pipe, optimizer, value=value)
    assert not list(tmp_path.iterdir())


def test_a_layers_extra_state_comes_along(tmp_path):
    """It is no tensor, and has no shape to compare."""

    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    pipe = GPipe(nn.Sequential(Counting(2, 2)), [1], devices=["cpu"])
    pipe[0].count = 7
    save(tmp_path / "run.pt", pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))
    pipe[0].count = 0
    load(tmp_path / "run.pt", pipe)
    assert pipe[0].count == 7


@pytest.mark.parametrize("part", ["random", "dtype"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, part):
    """Not the weights either, if the rest is missing or of another precision."""
    pipe, optimizer = new()
    save(tmp_path / "run.pt", pipe, optimizer)
    other, other_optimizer = new(seed=1)
    if part == "random":
        content = torch.load(tmp_path / "run.pt", weights_only=True)
        torch.save({**content, "random": {}}, tmp_path / "run.pt")
    else:
        other.double()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError, match=r"no state of torch's random|'0.weight' is torch.float32 in the file"):
        load(tmp_path / "run.pt", other, other_optimizer)
    assert equal(other.state_dict(), before)


# Where each stage is a process


def build(kind, balance):
    """A pipe of threads, of processes, or the plain model; and an optimiser with two groups."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
    if kind == "threads":
        model = GPipe(model, balance, devices=["cpu"] * len(balance), chunks=2, deferred_batch_norm=True)
    elif kind == "processes":
        model = DistributedGPipe(model, balance, chunks=2, deferred_batch_norm=True)
    weights, biases = ([p for p in model.parameters() if (p.dim() > 1) is has_two] for has_two in (True, False))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases}]
    return model, torch.optim.Adam(groups, lr=0.1)


def on_ranks(balance, file, before, after):
    pipe, optimizer = build("processes", balance)
    torch.manual_seed(7)
    if before is None:
        more = load(file, pipe, optimizer)
        assert more == {"note": [1, "two"]}
    else:
        train(pipe, optimizer, before)
        save(file, pipe, optimizer, note=[1, "two"])
    train(pipe, optimizer, after)
    return pipe.state_dict()


def joined(states):
    return {name: tensor for state in states for name, tensor in state.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("balance", [[1, 1, 1, 1], [2, 2]])
def test_what_processes_saved_goes_on_anywhere(tmp_path, balance):
    """On other numbers of processes, on threads, bit for bit, and on the plain model; one stage has no parameters."""
    file = tmp_path / "run.pt"
    undisturbed = joined(launch(on_ranks, len(balance), balance, file, 3, 2))
    for other in ([1, 1, 1, 1], [3, 1], [4]):
        assert equal(joined(launch(on_ranks, len(other), other, file, None, 2)), undisturbed)
        pipe, optimizer = build("threads", other)
        load(file, pipe, optimizer)
        train(pipe, optimizer, 2)
        assert equal(pipe.state_dict(), undisturbed)
    model, optimizer = build("plain", None)
    load(file, model, optimizer)
    assert model[1].num_batches_tracked == 3
    assert len(optimizer.state) == 6


@pytest.mark.distributed
def test_what_threads_saved_goes_on_in_processes(tmp_path):
    """With the shards of its predecessor gone, and other files left alone."""
    file = tmp_path / "run.pt"
    pipe, optimizer = build("threads", [2, 2])
    torch.manual_seed(7)
    train(pipe, optimizer, 3)
    save(file, pipe, optimizer, note=[1, "two"])
    train(pipe, optimizer, 2)
    assert equal(joined(launch(on_ranks, 3, [1, 1, 2], file, None, 2)), pipe.state_dict())
    (tmp_path / "run.pt.old.1of2").touch()
    for _ in range(2):
        launch(on_ranks, 2, [2, 2], file, 1, 0)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert len(kept) == 4
    assert kept[0] == "run.pt"
    assert "run.pt.old.1of2" in kept


@pytest.mark.distributed
def test_a_shard_that_is_lost_or_damaged_is_named(tmp_path):
    """And the crash of a rank that saves leaves the last good checkpoint."""
    file = tmp_path / "run.pt"
    launch(on_ranks, 2, [2, 2], file, 1, 0)

    def crashes():
        pipe, optimizer = build("processes", [2, 2])
        save(file, pipe, optimizer, note=(lambda: 0) if pipe.rank == 0 else None)

    before = file.read_bytes()
    with pytest.raises(LaunchError, match=r"(?s)rank 0 failed.*run\.pt cannot keep this"):
        launch(crashes, 2)
    assert file.read_bytes() == before
    model, optimizer = build("plain", None)
    load(file, model, optimizer)
    shard = next(path for path in tmp_path.iterdir() if path.name.endswith("1of2") and path.name in str(before))
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=r"run\.pt\.[0-9a-f]{8}\.1of2 is damaged"):
        load(file, model, optimizer)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match="1of2"):
        load(file, model, optimizer)
