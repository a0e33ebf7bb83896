"""Training from the command line: it learns, stops cleanly, and goes on exactly."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from gpipe_lite import train as training
from gpipe_lite.gpipe import GPipe
from gpipe_lite.options import parse
from gpipe_lite.saving import load, save
from gpipe_lite.trace import Trace
from gpipe_lite.train import main

SMALL = [
    "--size",
    "8",
    "--batch-size",
    "512",
    "--chunks",
    "2",
    "--epochs",
    "2",
    "--no-progress",
    "--balance",
    "2,2,2,3",
]
TEXT = [
    "--model",
    "transformer",
    "--layers",
    "1",
    "--width",
    "8",
    "--heads",
    "2",
    "--length",
    "32",
    "--batch-size",
    "64",
    "--chunks",
    "2",
    "--epochs",
    "1",
    "--no-progress",
    "--stages",
    "2",
]


def weights(path):
    """The model of a checkpoint, as its plain state dict."""
    return torch.load(path, weights_only=True)["model"]


def same(a, b):
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def interrupt_after(monkeypatch, steps):
    """Send this process SIGINT in the middle of the n-th step."""
    original, done = GPipe.step, []

    def step(self, *args, **options):
        result = original(self, *args, **options)
        if torch.is_grad_enabled():
            done.append(1)
            if len(done) == steps:
                signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(GPipe, "step", step)


@pytest.mark.parametrize("stages", ["2,2,2,3", "4,5", "9"])
def test_an_interrupted_and_resumed_run_is_bit_equal_to_an_undisturbed_one(tmp_path, capsys, monkeypatch, stages):
    """Stopped in the middle of the second epoch, resumed on as many stages, on two, on one."""
    straight, broken = str(tmp_path / "straight.pt"), str(tmp_path / "broken.pt")
    assert main([*SMALL, "--save", straight]) == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        assert main([*SMALL, "--save", broken]) == 130
    assert f"interrupted after 4 of 6 steps; saved to {broken}: go on with --resume" in capsys.readouterr().err
    assert not same(weights(straight), weights(broken))
    resumed = [*SMALL[:-1], stages, "--save", broken, "--resume"]
    assert main(resumed) == 0
    assert "resumed after step 4" in capsys.readouterr().out
    assert same(weights(straight), weights(broken))


def test_a_transformer_with_dropout_resumes_exactly(tmp_path, monkeypatch, capsys):
    """By another schedule's order of the same micro-batches: two, so that sums agree to the bit."""
    straight, broken = str(tmp_path / "straight.pt"), str(tmp_path / "broken.pt")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    options = [*TEXT, "--dropout", "0.3", "--data", f"text-folder={tmp_path / 'texts'}"]
    assert main([*options, "--save", straight]) == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1)
        assert main([*options, "--save", broken]) == 130
    assert main([*options, "--save", broken, "--resume", "--schedule", "1f1b", "--checkpoint", "always"]) == 0
    assert same(weights(straight), weights(broken))
    assert "test perplexity" in capsys.readouterr().out


def test_an_epoch_prints_one_line_with_its_figures(tmp_path, capsys):
    """Loss, accuracy, throughput, bubble; and the last step's trace can be kept."""
    trace = tmp_path / "trace.json"
    assert main([*SMALL, "--epochs", "1", "--trace", str(trace)]) == 0
    first, epoch, last = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "amoebanetd: 9 layers, 98,927 parameters, 1437 images; stages of [2, 2, 2, 3] layers on cpu, cpu"
    )
    for word in ("epoch 1/1  loss ", "test loss ", "test accuracy ", "images/s", "bubble "):
        assert word in epoch
    assert last.startswith("done: 1 epoch in ")
    assert last.endswith(epoch[epoch.index("test accuracy") :].split("  ")[0])
    assert Trace.load(trace).num_stages == 4


def test_a_loss_that_is_not_finite_stops_with_a_clear_word(tmp_path, capsys):
    """The checkpoint of the last good epoch stays."""
    file = tmp_path / "run.pt"
    assert main([*SMALL, "--lr", "1e30", "--save", str(file), "--save-every", "1"]) == 1
    said = capsys.readouterr().err
    assert "the loss is " in said
    assert "Try a smaller --lr than 1e+30" in said
    step = load(file, training.workload(parse(SMALL)).model)["step"]
    assert f"step {step + 1};" in said


def test_a_second_interrupt_stops_at_once(monkeypatch):
    """The first waits for the running step; the handler of before comes back in the end."""
    before = signal.getsignal(signal.SIGINT)

    def step(self, *args, **options):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(GPipe, "step", step)
    with pytest.raises(KeyboardInterrupt):
        main(SMALL)
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_file_an_interrupt_says_that_nothing_was_saved(monkeypatch, capsys):
    """So that nobody looks for it."""
    interrupt_after(monkeypatch, 1)
    assert main(SMALL) == 130
    assert "interrupted after 1 of 6 steps; nothing was saved, for want of --save FILE" in capsys.readouterr().err


BAD = {
    "images for text": (["--model", "transformer", "--data", "digits"], "transformer reads text"),
    "text for images": (["--data", "text"], "amoebanetd reads images"),
    "no such folder": (["--data", "cifar10=/nowhere"], "/nowhere"),
    "no such texts": (["--model", "transformer", "--data", "text-folder=/nowhere"], "/nowhere"),
    "balance": (["--balance", "1,2"], "covers 3 layers"),
    "device": (["--devices", "cuda:99,cpu,cpu,cpu"], "cuda:99"),
    "filters": (["--filters", "17"], "17"),
    "stages": (["--stages", "3", "--devices", "cpu,cpu"], "disagree: --stages 3, --devices 2"),
    "no such place": (["--save", "/nowhere/run.pt"], "there is no folder /nowhere"),
    "nothing to resume": (["--resume"], "--resume goes on from the file that --save names"),
    "no place for a trace": (["--trace", "/nowhere/t.json"], "--trace /nowhere/t.json: there is no folder"),
    "no checkpoint": (["--resume", "--save", "/nowhere/run.pt"], "there is no folder /nowhere"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_done_is_said_in_one_line(arguments, message, capsys):
    """No traceback; exit code 1."""
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "photos"], "'photos' is none of digits, cifar10=PATH"),
        (["--data", "cifar10"], "cifar10 needs a path, as in cifar10=PATH"),
        (["--data", "digits=x"], "digits takes no path"),
        (["--seed", str(2**64)], "is not a whole number from 0 to"),
        (["--seed", "-1"], "is not a whole number from 0 to"),
        (["--chunks", "0"], "'0' is not a whole number, 1 or more"),
    ],
)
def test_wrong_options_are_usage_errors(arguments, message, capsys):
    """With argparse's usage and exit code 2."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_what_the_result_depends_on_cannot_change_when_resumed(tmp_path, capsys):
    """Both values are shown; more epochs than were done are needed."""
    file = str(tmp_path / "run.pt")
    assert main([*SMALL, "--save", file]) == 0
    assert main([*SMALL, "--save", file, "--resume", "--seed", "5"]) == 1
    assert f"--seed is 5, and {file} was trained with 0" in capsys.readouterr().err
    assert main([*SMALL, "--save", file, "--resume", "--epochs", "1"]) == 1
    assert "the checkpoint has 6 steps, 1 epochs are 3: raise --epochs" in capsys.readouterr().err


def test_only_what_this_command_line_saved_is_resumed(tmp_path, capsys):
    """Another training's checkpoint may fit the model, and says nothing of the options."""
    work = training.workload(parse(SMALL))
    pipe = GPipe(work.model, [4, 5], devices=["cpu"] * 2)
    save(tmp_path / "run.pt", pipe, torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9), step=3)
    assert main([*SMALL, "--save", str(tmp_path / "run.pt"), "--resume"]) == 1
    assert "has no config, so no training on this command line wrote it" in capsys.readouterr().err


def test_defaults_follow_from_the_model():
    """A command line without options trains AmoebaNet-D on digits over four stages."""
    options = parse([])
    assert (options.layers, options.data, options.lr) == (3, ("digits", ""), 0.2)
    options = parse(["--model", "transformer"])
    assert (options.layers, options.data, options.lr) == (4, ("text", ""), 0.003)


def test_every_epoch_uses_every_sample_once_in_its_own_order():
    """The last, smaller batch included."""
    data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    epochs = [[y.tolist() for _, y in training.batches(data, 4, seed=1, epoch=epoch)] for epoch in (0, 1, 0)]
    assert [len(batch) for batch in epochs[0]] == [4, 4, 2]
    assert sorted(label for batch in epochs[0] for label in batch) == list(range(10))
    assert epochs[0] == epochs[2] != epochs[1]
    seeds = [[y.tolist() for _, y in training.batches(data, 10, seed=seed, epoch=0)] for seed in range(5)]
    assert all(a != b for i, a in enumerate(seeds) for b in seeds[:i])


def test_the_learning_rate_rises_to_its_peak_and_falls_to_nothing():
    """In a tenth of the steps, then along half a cosine."""
    rates = [training.learning_rate(2.0, step, 100) for step in range(100)]
    assert max(rates) == rates[9] == rates[10] == 2.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.01


def test_evaluation_leaves_mode_gradients_and_random_numbers_alone():
    """And it is the model's own loss and accuracy."""
    work = training.workload(parse(SMALL))
    pipe = GPipe(work.model, [4, 5], devices=["cpu"] * 2, chunks=2)
    before = torch.get_rng_state()
    loss, accuracy = training.evaluate(pipe, work.test, 100)
    assert torch.equal(torch.get_rng_state(), before)
    assert pipe.training
    assert all(parameter.grad is None for parameter in pipe.parameters())
    work.model.eval()
    with torch.no_grad():
        scores = work.model(work.test.tensors[0])
    assert loss == pytest.approx(float(training.loss_fn(scores, work.test.tensors[1])), rel=1e-5)
    assert accuracy == pytest.approx(float((scores.argmax(1) == work.test.tensors[1]).float().mean()))


def test_no_thread_is_left_when_training_ends():
    """Whatever way it ended."""
    before = set(threading.enumerate())
    assert main([*SMALL, "--epochs", "1"]) == 0
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_ctrl_c_in_a_terminal_stops_with_exit_code_130(tmp_path):
    """A process of its own, with the progress bar's output; no traceback, a checkpoint that loads."""
    file = tmp_path / "run.pt"
    command = [sys.executable, "-m", "gpipe_lite.train", "--save", str(file), "--save-every", "1", "--epochs", "50"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env=environment,
    )
    try:
        assert process.stdout is not None
        for _ in range(1200):  # until the first step has been saved, at most two minutes
            if file.exists() or process.poll() is not None:
                break
            threading.Event().wait(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert f"saved to {file}: go on with --resume" in err
    assert "amoebanetd: 9 layers" in out


def test_a_checkpoint_that_is_there_is_not_overwritten_by_a_new_training(tmp_path, capsys):
    """It may be days of work."""
    file = tmp_path / "run.pt"
    file.write_text("precious")
    assert main([*SMALL, "--save", str(file)]) == 1
    assert "is there already: add --resume to go on with it, or name another file" in capsys.readouterr().err
    assert file.read_text() == "precious"


def test_a_finished_training_that_is_resumed_says_how_good_it_is(tmp_path, capsys):
    """Though no epoch is left."""
    file = str(tmp_path / "run.pt")
    assert main([*SMALL, "--save", file]) == 0
    told = capsys.readouterr().out.splitlines()[-1].split("test ", 1)[1]
    assert main([*SMALL, "--save", file, "--resume"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split("test ", 1)[1] == told


# A process a stage


def torchrun(folder, *arguments, restarts=0, killer=None):
    """Run the command line under torchrun, four processes; what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--max-restarts", str(restarts)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--monitor-interval", "0.1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "-m", "gpipe_lite.train", *SMALL, *arguments], cwd=folder, env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:  # fmt: skip
        if killer is not None:
            killer(running.pid)
        try:
            out, err = running.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            running.terminate()
            raise
    assert running.returncode == 0, err
    return out


def kill_one_when(file):
    """Kill the second process once there is a checkpoint; only that."""

    def kill(pid):
        deadline = time.monotonic() + 60
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)

    return kill


def whole_model(file):
    """What a checkpoint has, in shards or not."""
    model = training.workload(parse(SMALL)).model
    load(file, model)
    return model.state_dict()


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_processes_train_to_the_bits_of_threads_and_survive_a_killed_one(tmp_path, capsys):
    """Under torchrun: the same weights after two epochs; killed and restarted, from the last checkpoint, likewise."""
    main([*SMALL, "--save", str(tmp_path / "threads.pt")])
    expected = whole_model(tmp_path / "threads.pt")
    by_threads = [line.split("  ")[:3] for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    out = torchrun(tmp_path, "--save", "run.pt", "--trace", "run.json")
    assert [line.split("  ")[:3] for line in out.splitlines() if line.startswith("epoch")] == by_threads
    trace = Trace.load(tmp_path / "run.json")
    assert (trace.num_devices, trace.num_stages) == (4, 4)
    trace.schedule.check()
    found = whole_model(tmp_path / "run.pt")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    out = torchrun(tmp_path, "--save", "killed.pt", "--save-every", "1", restarts=2,
                   killer=kill_one_when(tmp_path / "killed.pt"))  # fmt: skip
    assert "resumed after step" in out
    found = whole_model(tmp_path / "killed.pt")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.distributed
def test_another_number_of_processes_than_stages_is_refused_in_one_line(tmp_path):
    """By each of them, with both numbers."""
    with pytest.raises(AssertionError, match="the numbers of stages disagree: the processes of torchrun 4, --stages 3"):
        torchrun(tmp_path, "--stages", "3", "--balance", "3,3,3")
