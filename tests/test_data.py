"""The data sets are what their docstrings say, and say clearly what is wrong with a file."""

import io
import pydoc_data.topics
import sys
import tarfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

from gpipe_lite import data

RECORD = 3073
TRAIN_FILES = [f"data_batch_{i}.bin" for i in range(1, 6)]


def record(label, red=0, green=0, blue=0):
    return bytes([label]) + bytes([red]) * 1024 + bytes([green]) * 1024 + bytes([blue]) * 1024


def cifar_files():
    """Two images a training file, labels 0 to 9 in order, and one image to test on."""
    files = {name: record(2 * i) + record(2 * i + 1) for i, name in enumerate(TRAIN_FILES)}
    return {**files, "test_batch.bin": record(7, red=255)}


@pytest.fixture
def cifar_folder(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name, content in cifar_files().items():
        (folder / name).write_bytes(content)
    return folder


def write_archive(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def cifar_archive(tmp_path):
    files = {f"cifar-10-batches-bin/{name}": content for name, content in cifar_files().items()}
    return write_archive(tmp_path / "cifar-10-binary.tar.gz", files)


# Digits


@pytest.mark.parametrize("size", [8, 16, 33])
def test_digits_have_the_documented_shapes_and_types(size):
    """1437 images to train on and 360 to test on, grey, of the size asked for."""
    for train, number in ((True, 1437), (False, 360)):
        images, labels = data.digits(size, train=train).tensors
        assert images.shape == (number, 1, size, size)
        assert images.dtype == torch.float32
        assert labels.shape == (number,)
        assert labels.dtype == torch.int64
        assert images.is_contiguous()


def test_digits_are_split_without_overlap_and_leave_none_out():
    """Undoing the normalisation gives scikit-learn's own images, each once, with its own label."""
    pixels, labels = load_digits(return_X_y=True)
    parts = [data.digits(8, train=train).tensors for train in (True, False)]
    images, found = (torch.cat(column) for column in zip(*parts, strict=True))
    images = images.flatten(1)
    low, high = images.min(), images.max()
    restored = ((images - low) / (high - low) * 16).round().to(torch.int64)
    expected = sorted([*row, label] for row, label in zip(pixels.astype(int).tolist(), labels, strict=True))
    assert sorted([*row, label] for row, label in zip(restored.tolist(), found.tolist(), strict=True)) == expected


def test_digits_are_as_frequent_in_both_parts():
    """Within one image of their share."""
    train, test = (data.digits(8, train=train).tensors[1].bincount() for train in (True, False))
    assert ((train + test) * 360 / 1797 - test).abs().max() < 1


def test_digits_are_split_the_same_way_every_time():
    """Whatever the state of the global generators, and for every size."""
    torch.manual_seed(1)
    first = data.digits(8, train=False).tensors
    torch.manual_seed(2)
    for one, other in zip(first, data.digits(8, train=False).tensors, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(first[1], data.digits(20, train=False).tensors[1])


def test_images_are_normalised_over_the_training_part():
    """Mean 0 and standard deviation 1 there, and nearly so in the test part."""
    train, test = (data.digits(16, train=train).tensors[0] for train in (True, False))
    torch.testing.assert_close(train.mean(), torch.tensor(0.0), rtol=0, atol=1e-5)
    torch.testing.assert_close(train.std(), torch.tensor(1.0), rtol=0, atol=1e-5)
    assert abs(test.mean()) < 0.05


def test_upsampling_keeps_the_picture():
    """A digit twice as large, averaged back by twos, is nearly the digit."""
    small, large = (data.digits(size, train=False).tensors[0] for size in (8, 16))
    back = torch.nn.functional.avg_pool2d(large, 2)
    assert torch.corrcoef(torch.stack([small.flatten(), back.flatten()]))[0, 1] > 0.97


@pytest.mark.parametrize("size", [7, 0, 16.0, True])
def test_a_size_below_the_originals_is_refused(size):
    """The error says what came and what is possible."""
    with pytest.raises(ValueError, match=f"size is a whole number of pixels, not {size!r}: take 8"):
        data.digits(size)


def test_without_scikit_learn_the_error_names_the_package(monkeypatch):
    """And how to install it."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-learn"):
        data.digits()


# CIFAR-10


@pytest.mark.parametrize("source", ["cifar_folder", "cifar_archive"])
def test_cifar10_reads_the_folder_and_the_archive_in_the_order_of_the_files(source, request):
    """As documented: shapes, types, and labels in order."""
    path = request.getfixturevalue(source)
    images, labels = data.cifar10(path).tensors
    assert images.shape == (10, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert labels.tolist() == list(range(10))
    assert data.cifar10(str(path), train=False).tensors[1].tolist() == [7]


def test_cifar10_pixels_are_rows_of_red_then_green_then_blue(cifar_folder):
    """Normalised by each colour's mean and standard deviation."""
    pixels = torch.randint(256, (3, 32, 32), dtype=torch.uint8)
    (cifar_folder / "test_batch.bin").write_bytes(b"\x03" + pixels.numpy().tobytes())
    image, label = data.cifar10(cifar_folder, train=False)[0]
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    torch.testing.assert_close(image, ((pixels / 255).permute(1, 2, 0) - mean).div(std).permute(2, 0, 1))
    assert data.CIFAR10_CLASSES[label] == "cat"


def test_cifar10_reads_an_archive_that_a_browser_has_unpacked(tmp_path):
    """A plain .tar, with the files at any depth and in any order."""
    files = {f"a/b/{name}": content for name, content in reversed(cifar_files().items())}
    path = write_archive(tmp_path / "cifar.tar", files, mode="w")
    assert data.cifar10(path).tensors[1].tolist() == list(range(10))


def test_cifar10_writes_nothing_and_follows_no_link(tmp_path, cifar_folder):
    """An archive with links in the place of files is refused, and leaves no trace on the disk."""
    path = tmp_path / "links.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in TRAIN_FILES:
            member = tarfile.TarInfo(f"../{name}")
            member.type = tarfile.SYMTYPE
            member.linkname = str(cifar_folder / name)
            archive.addfile(member)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileNotFoundError, match=r"has 0 of the 5 files"):
        data.cifar10(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_cifar10_refuses_the_pickles_of_the_python_version(tmp_path):
    """Its files have no .bin; nothing in them is read."""
    path = write_archive(tmp_path / "cifar-10-python.tar.gz", {"cifar-10-batches-py/data_batch_1": b"x"})
    with pytest.raises(FileNotFoundError, match=r"not data_batch_1\.bin, .* take the binary version"):
        data.cifar10(path)


def test_cifar10_says_where_to_get_what_is_absent(tmp_path):
    """Neither file nor folder."""
    with pytest.raises(FileNotFoundError, match=r"does not exist: .*cifar-10-binary\.tar\.gz"):
        data.cifar10(tmp_path / "nowhere")


def test_cifar10_names_the_missing_file_of_a_folder(cifar_folder):
    """And the folder that has it."""
    (cifar_folder / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no data_batch_3\.bin: .*cifar-10-batches-bin"):
        data.cifar10(cifar_folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes, 0 images of 3073 bytes and 0 bytes left over: it is cut short"),
        (record(1)[:-1], "has 3072 bytes, 0 images of 3073 bytes and 3072 bytes left over"),
        (record(1) + b"abc", "has 3076 bytes, 1 images of 3073 bytes and 3 bytes left over"),
        (record(1) + record(10), "has a label 10, and CIFAR-10 has labels 0 to 9"),
        (bytes(10_000 * RECORD + 1), "is larger than 30730000 bytes, 10000 images"),
    ],
)
def test_cifar10_says_what_is_wrong_with_a_file(cifar_folder, content, message):
    """Cut short, of the wrong size, or not CIFAR-10 at all."""
    (cifar_folder / "test_batch.bin").write_bytes(content)
    with pytest.raises(ValueError, match=f"test_batch.bin {message}"):
        data.cifar10(cifar_folder, train=False)


@given(share=st.floats(0.0, 0.95))
def test_cifar10_refuses_an_archive_that_is_cut_short_anywhere(tmp_path_factory, share):
    """Wherever a download broke off, before the end of the last file."""
    folder = tmp_path_factory.mktemp("cut")
    noise = torch.randint(10, (5, RECORD), dtype=torch.uint8).numpy()  # hard to compress
    files = {name: content.tobytes() for name, content in zip(TRAIN_FILES, noise, strict=True)}
    path = write_archive(folder / "cifar.tar.gz", files)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"is no archive, or a damaged one: get cifar-10-binary\.tar\.gz again"):
        data.cifar10(path)


def test_cifar10_refuses_what_is_no_archive(tmp_path):
    """Such as the page that a server sent in its place."""
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_text("<html>404</html>")
    with pytest.raises(ValueError, match="is no archive, or a damaged one"):
        data.cifar10(path)


# Text


@given(content=st.text(), tokens=st.lists(st.integers(0, 255)))
def test_tokens_are_bytes_and_decode_undoes_encode(content, tokens):
    """For any text; and any tokens decode to something."""
    content = content.encode(errors="ignore").decode()
    encoded = data.encode(content)
    assert encoded.dtype == torch.int64
    assert encoded.tolist() == list(content.encode())
    assert data.decode(encoded) == data.decode(encoded.tolist()) == content
    assert isinstance(data.decode(torch.tensor(tokens)), str)


@settings(max_examples=20)
@given(length=st.integers(1, 300))
def test_text_is_python_s_help_cut_into_sequences(length):
    """Training and test part in order are the text, but for an end shorter than a sequence."""
    whole = data.encode("\n".join(pydoc_data.topics.topics.values()))
    train, test = (data.text(length, train=train).tensors for train in (True, False))
    inputs, targets = (torch.cat(pair) for pair in zip(train, test, strict=True))
    assert inputs.shape == targets.shape
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs.flatten(), whole[: inputs.numel()])
    assert torch.equal(targets.flatten(), whole[1 : inputs.numel() + 1])
    assert len(whole) - 1 - inputs.numel() < length
    assert len(test[0]) == len(inputs) // 10
    assert inputs.max() < data.VOCAB_SIZE


@pytest.mark.parametrize("length", [0, -5, 2.0, True])
def test_a_length_below_1_is_refused(length):
    """The error says what came."""
    with pytest.raises(ValueError, match=f"length is a whole number of tokens, 1 or more, not {length!r}"):
        data.text(length)


def test_without_help_pages_the_error_says_what_to_install(monkeypatch):
    """Small installations of Python leave them out."""
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ModuleNotFoundError, match="install the full standard library"):
        data.text()


def test_a_text_folder_is_its_txt_files_in_the_order_of_their_names(tmp_path):
    """Joined by line ends; what is not a .txt file is left out."""
    (tmp_path / "b.txt").write_text("zwei", encoding="utf-8")
    (tmp_path / "a.txt").write_text("ünö", encoding="utf-8")
    (tmp_path / "c.md").write_text("three")
    (tmp_path / "d.txt").mkdir()
    train, test = (data.text_folder(str(tmp_path), 2, train=train).tensors for train in (True, False))
    assert data.decode(torch.cat([*train[0], *test[0]])) == "ünö\nzwe"[:-1]
    assert len(test[0]) == 1


def test_two_sequences_are_the_least_text(tmp_path):
    """One to train and one to test; for 2 · 3 tokens and the one after them."""
    (tmp_path / "a.txt").write_text("abcdefg")
    assert data.decode(data.text_folder(tmp_path, 3)[0][0]) == "abc"
    assert data.decode(data.text_folder(tmp_path, 3, train=False)[0][1]) == "efg"
    with pytest.raises(ValueError, match=r"has 7 tokens, .* length 4, .* take 9: take a length of 3 or less"):
        data.text_folder(tmp_path, 4)


def test_too_little_text_for_any_length_is_refused(tmp_path):
    """Empty files included."""
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"has 0 tokens, .* take 3: add text"):
        data.text_folder(tmp_path, 1)


def test_a_text_folder_says_what_is_wrong_with_its_path(tmp_path):
    """Absent, a file, or without texts."""
    with pytest.raises(FileNotFoundError, match="does not exist: give the path of a folder"):
        data.text_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds 0 \.txt files: put 1 or more into it"):
        data.text_folder(tmp_path)
    file = tmp_path / "a.txt"
    file.write_text("abc")
    with pytest.raises(NotADirectoryError, match="is a file: give the path of the folder"):
        data.text_folder(file)


def test_a_text_that_is_not_utf_8_is_named_with_the_place(tmp_path):
    """Such as one in Latin-1."""
    (tmp_path / "a.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8: byte 2 of 5 is 0xef; save it as UTF-8"):
        data.text_folder(tmp_path, 1)


def test_a_data_loader_takes_them_all(cifar_folder):
    """Ordinary data sets: batches of inputs and targets."""
    for dataset in (data.digits(8), data.text(32), data.cifar10(cifar_folder)):
        inputs, targets = next(iter(DataLoader(dataset, batch_size=4, shuffle=True)))
        assert len(inputs) == len(targets) == 4
