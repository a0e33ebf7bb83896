"""Real data to train on. Nothing is ever downloaded, and nothing that is read is executed.

===================  ==========================  =========================  ===================  ============
function             what                        inputs                     targets              train / test
===================  ==========================  =========================  ===================  ============
:func:`digits`       handwritten digits, from    float32 (1, size, size)    int64 (), 0 to 9     1437 / 360
                     scikit-learn
:func:`cifar10`      colour photographs, from    float32 (3, 32, 32)        int64 (), 0 to 9     50000 / 10000
                     the archive that you have
:func:`text`         English, from Python's own  int64 (length,), 0 to 255  the next tokens, as  about 9 : 1
                     help pages                                             the inputs
:func:`text_folder`  your own ``.txt`` files     as ``text``                as ``text``          about 9 : 1
===================  ==========================  =========================  ===================  ============

Each returns a ``TensorDataset``: ``dataset[i]`` is one ``(input, target)``, and ``dataset.tensors`` are all
inputs and all targets. Images have mean 0 and standard deviation 1 over the training images. Tokens are the
bytes of UTF-8, so there are :data:`VOCAB_SIZE` of them for any text; :func:`decode` makes them readable.
"""

import gzip
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

VOCAB_SIZE = 256
"""The number of different tokens: the values of a byte."""

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
"""What the labels of :func:`cifar10` mean."""

_CIFAR10_RECORD = 1 + 3 * 32 * 32  # bytes: a label, then the red, the green and the blue pixels
_CIFAR10_RECORDS = 10_000  # in a batch file
# Of the training images, for each colour, as fractions of the brightest pixel.
_CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
_CIFAR10_STD = (0.2470, 0.2435, 0.2616)


def digits(size: int = 16, *, train: bool = True) -> TensorDataset:
    """Handwritten digits, 8×8 pixels in grey, enlarged.

    Source: scikit-learn's ``load_digits``, 1797 images that come with the package. They are the test set of
    E. Alpaydin and C. Kaynak, *Optical Recognition of Handwritten Digits*, UCI Machine Learning Repository,
    1998, doi 10.24432/C50P49. Licence: CC BY 4.0.

    Args:
        size: height and width in pixels, 8 or more; bilinear between the original pixels.
        train: 1437 images to train on, else the other 360 to test on. The split is random, always the same
            one, and every digit is as frequent in both parts.

    Returns:
        Images, float32 of shape (N, 1, size, size), and labels, int64 of shape (N,), the digits 0 to 9.

    Raises:
        ModuleNotFoundError: if scikit-learn is not installed.
        ValueError: if the size is below 8.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 8:
        raise ValueError(f"size is a whole number of pixels, not {size!r}: take 8, as the originals, or more")
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits come with the package scikit-learn, which is missing: pip install scikit-learn",
            name=error.name,
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    rows = train_test_split(range(len(labels)), test_size=360, random_state=0, stratify=labels)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    images = functional.interpolate(images, (size, size), mode="bilinear", align_corners=False)
    seen = images[rows[0]]
    chosen = rows[0] if train else rows[1]
    return TensorDataset((images[chosen] - seen.mean()) / seen.std(), torch.tensor(labels[chosen], dtype=torch.int64))


def cifar10(path: str | Path, *, train: bool = True) -> TensorDataset:
    """CIFAR-10: photographs of ten kinds of things, 32×32 pixels in colour.

    Source: A. Krizhevsky, *Learning Multiple Layers of Features from Tiny Images*, 2009. The **binary**
    version, ``cifar-10-binary.tar.gz`` (162 MB), is on www.cs.toronto.edu/~kriz/cifar.html, which states no
    licence and asks to cite the report. The Python version consists of pickles, which can run code when they
    are read; it is refused.

    Args:
        path: of the archive, or of the folder ``cifar-10-batches-bin`` in it. The archive is read in place.
        train: 50,000 images to train on (614 MB), else 10,000 to test on. Files with fewer images will do.

    Returns:
        Images, float32 of shape (N, 3, 32, 32), colours red, green, blue, and labels, int64 of shape (N,),
        which index :data:`CIFAR10_CLASSES`.

    Raises:
        FileNotFoundError: if there is nothing at the path, or a batch file is missing.
        ValueError: if a file is not a CIFAR-10 batch, or is damaged.
    """
    path = Path(path)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
    if path.is_dir():
        files = _read_folder(path, names)
    elif path.is_file():
        files = _read_archive(path, names)
    else:
        raise FileNotFoundError(
            f"{path} does not exist: give the path of cifar-10-binary.tar.gz, or of the folder "
            "cifar-10-batches-bin in it, from www.cs.toronto.edu/~kriz/cifar.html"
        )
    records = torch.cat([_cifar10_records(name, file) for name, file in zip(names, files, strict=True)])
    images = records[:, 1:].reshape(-1, 3, 32, 32).float().div_(255)
    images.sub_(torch.tensor(_CIFAR10_MEAN).view(3, 1, 1)).div_(torch.tensor(_CIFAR10_STD).view(3, 1, 1))
    return TensorDataset(images, records[:, 0].long())


def text(length: int = 128, *, train: bool = True) -> TensorDataset:
    """Python's own help pages, in English: some 466,000 tokens; the text is that of the running Python.

    Source: ``pydoc_data.topics``, which ``help()`` shows. Licence: PSF License Version 2.

    Args:
        length: T, tokens in a sequence, 1 or more.
        train: the first nine tenths of the sequences, else the last tenth to test on.

    Returns:
        Sequences, int64 of shape (N, T), and for each of their tokens the next one, of the same shape.

    Raises:
        ModuleNotFoundError: if this Python came without its help pages.
        ValueError: if the length is below 1, or the text too short for two sequences.
    """
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this Python came without its help pages, pydoc_data.topics: install the full standard library "
            "(on Debian and Ubuntu, the package python3), or give texts of your own to text_folder",
            name=error.name,
        ) from error
    return _sequences("\n".join(topics.values()).encode(), length, train, "the help pages")


def text_folder(path: str | Path, length: int = 128, *, train: bool = True) -> TensorDataset:
    """A folder of your own text files, joined in the order of their names.

    Args:
        path: of a folder with ``.txt`` files, in UTF-8. Folders in it are left out.
        length: T, tokens in a sequence, 1 or more.
        train: the first nine tenths of the sequences, else the last tenth to test on.

    Returns:
        As :func:`text`. It takes 8 bytes of memory a token.

    Raises:
        FileNotFoundError: if there is no such folder, or no ``.txt`` file in it.
        NotADirectoryError: if the path is a file.
        ValueError: if a file is not UTF-8, the length below 1, or the text too short for two sequences.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give the path of a folder with .txt files")
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file: give the path of the folder, {path.parent}")
    files = sorted(file for file in path.glob("*.txt") if file.is_file())
    if not files:
        raise FileNotFoundError(f"{path} holds 0 .txt files: put 1 or more into it")
    contents = []
    for file in files:
        content = file.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8: byte {error.start} of {len(content)} is 0x{content[error.start]:02x}; "
                "save it as UTF-8"
            ) from error
        contents.append(content)
    return _sequences(b"\n".join(contents), length, train, str(path))


def encode(text: str) -> Tensor:
    """Text to tokens, int64 of shape (T,)."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def decode(tokens: Tensor | Iterable[int]) -> str:
    """Tokens to text. Where a sequence starts or ends within a letter of several bytes, it reads �."""
    return bytes(tokens.tolist() if isinstance(tokens, Tensor) else tokens).decode(errors="replace")


def _sequences(content: bytes, length: int, train: bool, where: str) -> TensorDataset:
    """Cut text into sequences that do not overlap. Targets share their memory, read one token later."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"length is a whole number of tokens, 1 or more, not {length!r}")
    num_sequences = (len(content) - 1) // length  # the last token is nobody's input
    if num_sequences < 2:
        raise ValueError(
            f"{where} has {len(content)} tokens, and two sequences of length {length}, one to train and one "
            f"to test, take {2 * length + 1}: "
            + (f"take a length of {(len(content) - 1) // 2} or less" if len(content) > 2 else "add text")
        )
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    inputs, targets = (tokens[shift : shift + num_sequences * length].view(num_sequences, length) for shift in (0, 1))
    num_train = num_sequences - max(1, num_sequences // 10)
    part = slice(num_train) if train else slice(num_train, None)
    return TensorDataset(inputs[part], targets[part])


def _read_folder(folder: Path, names: list[str]) -> list[bytes]:
    """The files of these names; of each at most one byte too many."""
    files = []
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} has no {name}: give the path of the folder cifar-10-batches-bin, from the binary "
                "version of CIFAR-10, cifar-10-binary.tar.gz"
            )
        with (folder / name).open("rb") as file:
            files.append(file.read(_CIFAR10_RECORDS * _CIFAR10_RECORD + 1))
    return files


def _read_archive(path: Path, names: list[str]) -> list[bytes]:
    """The files of these names, wherever in the archive; of each at most one byte too many."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:  # members are read, never extracted: their paths and links do not matter
                name = Path(member.name).name
                if member.isfile() and name in names and (file := archive.extractfile(member)) is not None:
                    found[name] = file.read(_CIFAR10_RECORDS * _CIFAR10_RECORD + 1)
                if len(found) == len(names):
                    break
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is no archive, or a damaged one: get cifar-10-binary.tar.gz again") from error
    if missing := [name for name in names if name not in found]:
        raise FileNotFoundError(
            f"{path} has {len(found)} of the {len(names)} files, and not {', '.join(missing)}: take the "
            "binary version of CIFAR-10, cifar-10-binary.tar.gz"
        )
    return [found[name] for name in names]


def _cifar10_records(name: str, content: bytes) -> Tensor:
    """The records of a batch file, uint8 of shape (N, 3073)."""
    num_records, rest = divmod(len(content), _CIFAR10_RECORD)
    if len(content) > _CIFAR10_RECORDS * _CIFAR10_RECORD:
        raise ValueError(
            f"{name} is larger than {_CIFAR10_RECORDS * _CIFAR10_RECORD} bytes, {_CIFAR10_RECORDS} images: "
            "it is not a batch of CIFAR-10, get the binary version again"
        )
    if num_records == 0 or rest:
        raise ValueError(
            f"{name} has {len(content)} bytes, {num_records} images of {_CIFAR10_RECORD} bytes and {rest} "
            "bytes left over: it is cut short, or not the binary version of CIFAR-10; get it again"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(num_records, _CIFAR10_RECORD)
    if (largest := int(records[:, 0].max())) > 9:
        raise ValueError(f"{name} has a label {largest}, and CIFAR-10 has labels 0 to 9: get the binary version")
    return records
