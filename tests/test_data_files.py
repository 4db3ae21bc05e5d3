"""Data sets in their published formats: read, refused where damaged, and downloaded."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import os
import re
import struct
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gossamer import workloads
from gossamer.cli.data import data_command
from gossamer.errors import UserError
from gossamer.workloads.files import data_folder
from gossamer.workloads.imagenet import imagenet_floats, read_imagenet
from gossamer.workloads.images import cifar_floats, read_cifar10, read_fashion_mnist
from gossamer.workloads.multi30k import read_multi30k
from gossamer.workloads.sources import DATA_SETS, Source, download, find_data_set
from gossamer.workloads.wikitext import read_wikitext2
from gossamer.workloads.workload import Transform

FROM_FILES = {
    "fashion-mnist-cnn": "fashion-mnist/train-images-idx3-ubyte.gz",
    "cifar10-resnet20": "cifar-10-batches-bin/data_batch_1.bin",
    "cifar10-resnet8": "cifar-10-batches-bin/data_batch_1.bin",
    "cifar10-densenet100": "cifar-10-batches-bin/data_batch_1.bin",
    "imagenet-resnet50": "imagenet/train",
    "wikitext2-lstm": "wikitext-2/wiki.train.tokens",
    "shakespeare-gpt": "tinyshakespeare/input.txt",
    "multi30k-transformer": "multi30k/train.en",
}


def write(path: Path, contents: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents)


def bytes_of(*shape: int, seed: int = 0, below: int = 256) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(below, size=shape, dtype=np.uint8)


def write_fashion_mnist(folder: Path) -> None:
    for part, num in (("train", 7), ("t10k", 3)):
        images = struct.pack(">4I", 0x803, num, 28, 28) + bytes_of(num, 28, 28).tobytes()
        labels = struct.pack(">2I", 0x801, num) + bytes_of(num, below=10).tobytes()
        for kind, contents in (("images-idx3", images), ("labels-idx1", labels)):
            name = f"fashion-mnist/{part}-{kind}-ubyte.gz"
            write(folder / name, gzip.compress(contents))


def write_cifar10(folder: Path) -> None:
    for seed, part in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        labels, pixels = bytes_of(4, 1, seed=seed, below=10), bytes_of(4, 3072, seed=seed)
        contents = np.concatenate([labels, pixels], 1).tobytes()
        write(folder / f"cifar-10-batches-bin/{part}.bin", contents)


def write_wikitext2(folder: Path) -> None:
    write(folder / "wikitext-2/wiki.train.tokens", (" \n = a = \n \n a <unk> b\n" * 4).encode())
    write(folder / "wikitext-2/wiki.test.tokens", (" b a = \n" * 10).encode())


def write_multi30k(folder: Path) -> None:
    for part, num in (("train", 6), ("test_2016_flickr", 2)):
        write(folder / f"multi30k/{part}.en", b"Two men, outside.\n" * num)
        write(folder / f"multi30k/{part}.de", "Zwei Männer im T-Shirt.\n".encode() * num)


READERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any], str]] = {
    "fashion-mnist": (
        write_fashion_mnist,
        partial(read_fashion_mnist, num_train=7, num_test=3),
        "fashion-mnist/t10k-images-idx3-ubyte.gz",
    ),
    "cifar10": (
        write_cifar10,
        partial(read_cifar10, per_file=4),
        "cifar-10-batches-bin/data_batch_3.bin",
    ),
    "wikitext2": (
        write_wikitext2,
        partial(read_wikitext2, num_train=40, num_test=40, vocabulary=5),
        "wikitext-2/wiki.train.tokens",
    ),
    "multi30k": (
        write_multi30k,
        partial(read_multi30k, num_train=6, num_test=2),
        "multi30k/train.de",
    ),
}


@pytest.mark.parametrize("data_set", READERS)
def test_missing_and_cut_files_are_named(data_set: str, tmp_path: Path) -> None:
    """The message has the file, where it was searched for or what it lacks, and the command."""
    write_files, read, name = READERS[data_set]
    write_files(tmp_path)
    read(tmp_path)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    command = re.escape(f"gossamer data {data_set} --data-dir {tmp_path}")
    with pytest.raises(UserError, match=rf"{name} must have .*, got .*{command}"):
        read(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=rf"needs {name}, which is not in {tmp_path}.*{command}"):
        read(tmp_path)


@pytest.mark.parametrize("name", FROM_FILES)
def test_a_workload_without_its_data_says_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is downloaded by itself; what a run would cost is known without the data."""
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
    workload = workloads.find(name)
    assert workload.num_train > 1000
    with pytest.raises(UserError, match=rf"needs .*{FROM_FILES[name]}.* not in {tmp_path}"):
        workload.load()
    assert not any(tmp_path.iterdir())


def test_fashion_mnist_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Pixels and labels come back in their order, and labels serve skewed shards."""
    write_fashion_mnist(tmp_path)
    data = read_fashion_mnist(tmp_path, 7, 3)
    everything = torch.arange(7)
    assert np.array_equal(data.train_inputs[everything][:, 0], bytes_of(7, 28, 28))
    assert data.train_targets[everything].tolist() == bytes_of(7, below=10).tolist()
    assert data.labels is not None
    assert torch.equal(data.labels, data.train_targets[everything])
    label_file = tmp_path / "fashion-mnist/train-labels-idx1-ubyte.gz"
    label_file.write_bytes(gzip.compress(struct.pack(">2I", 0x801, 7) + b"\x0b" * 7))
    with pytest.raises(UserError, match="must have labels of 0 to 9, got 11"):
        read_fashion_mnist(tmp_path, 7, 3)


def test_cifar10_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A record is a label and three planes; files follow each other."""
    write_cifar10(tmp_path)
    data = read_cifar10(tmp_path, per_file=4)
    inputs = data.train_inputs[torch.arange(20)]
    assert inputs.shape == (20, 3, 32, 32)
    assert np.array_equal(inputs[8:12].flatten(1), bytes_of(4, 3072, seed=2))
    assert data.train_targets[torch.arange(4)].tolist() == bytes_of(4, below=10).tolist()
    assert len(data.test_inputs) == 4
    smaller = read_cifar10(tmp_path, per_file=4, pixels=16)
    means = inputs.view(20, 3, 16, 2, 16, 2).double().mean((3, 5))
    difference = smaller.train_inputs[torch.arange(20)].double() - means
    assert difference.abs().max() <= 0.5  # of bytes
    with pytest.raises(UserError, match="pixels of 8, 16 or 32, got 12"):
        workloads.find("cifar10-resnet8(pixels=12)")


def augmented(transform: Transform, samples: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the inputs of one worker's training."""
    return transform(samples.unsqueeze(0), lambda: [np.random.default_rng(seed)])[0]


def test_crops_are_windows_of_the_padded_image_and_seeded() -> None:
    """Every augmented image is the image moved by at most 4 pixels, or its mirror image."""
    images = torch.randint(1, 256, (40, 3, 32, 32), dtype=torch.uint8)
    first, again = (augmented(cifar_floats, images, 3) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, augmented(cifar_floats, images, 4))
    together = cifar_floats(
        images.unflatten(0, (2, 20)), lambda: [*map(np.random.default_rng, (3, 4))]
    )
    assert torch.equal(together[0], augmented(cifar_floats, images[:20], 3))
    assert torch.equal(together[1], augmented(cifar_floats, images[20:], 4))
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    moved = {
        (top, left): cifar_floats(padded[:, :, top : top + 32, left : left + 32], None)
        for top in range(9)
        for left in range(9)
    }
    flips = 0
    for i, image in enumerate(first):
        plain = any(torch.equal(image, each[i]) for each in moved.values())
        mirrored = any(torch.equal(image, each[i].flip(-1)) for each in moved.values())
        assert plain != mirrored
        flips += mirrored
    assert 8 < flips < 32


def test_images_are_decoded_when_they_are_asked_for(tmp_path: Path) -> None:
    """A folder per class; shorter sides become 256; a damaged image is named when it is met."""
    image_module = pytest.importorskip("PIL.Image")
    for part, num in (("train", 3), ("val", 1)):
        for label, name in enumerate(("n01", "n02")):
            for i in range(num):
                path = tmp_path / f"imagenet/{part}/{name}/{i}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                image_module.new("RGB", (300, 400), (40 + 100 * label, 0, 0)).save(path)
    read = partial(read_imagenet, num_train=6, num_test=2, num_classes=2)
    data = read(tmp_path)
    images = data.train_inputs[torch.tensor([[0, 5]])]
    assert images.shape == (1, 2, 3, 256, 256)
    assert images[0, :, 0].float().mean((1, 2)).tolist() == pytest.approx([40, 140], abs=3)
    assert data.train_targets[torch.tensor([0, 5])].tolist() == [0, 1]
    (tmp_path / "imagenet/train/n01/1.JPEG").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"n01/1\.JPEG must be a readable image"):
        data.train_inputs[torch.tensor([1])]
    with pytest.raises(UserError, match="must hold 7 images in folders of classes, got 6"):
        read(tmp_path, num_train=7)


def test_parts_of_images_are_resampled_within_the_image() -> None:
    """For the test the centre; for training a part: of one colour it stays that colour."""
    images = torch.full((4, 3, 256, 256), 200, dtype=torch.uint8)
    centre = imagenet_floats(images, None)
    part = augmented(imagenet_floats, images, 0)
    assert centre.shape == part.shape == (4, 3, 224, 224)
    torch.testing.assert_close(part, centre, atol=1e-4, rtol=0)
    gradient = torch.arange(256, dtype=torch.uint8).expand(4, 3, 256, 256)
    widths = augmented(imagenet_floats, gradient, 0)[:, 0, 0]
    assert len({round(float(row[-1] - row[0]), 3) for row in widths}) == 4


def test_words_are_numbered_and_line_ends_are_words(tmp_path: Path) -> None:
    """The test data use the indices of the training data; an unknown word there is refused."""
    write_wikitext2(tmp_path)
    data = read_wikitext2(tmp_path, 40, 40, vocabulary=5)
    first = data.train_inputs[torch.tensor([0])][0]
    assert first[:10].tolist() == [0, 1, 2, 1, 0, 0, 2, 3, 4, 0]
    assert data.test_inputs[torch.tensor([0])][0, :4].tolist() == [4, 2, 1, 0]
    test_file = tmp_path / "wikitext-2/wiki.test.tokens"
    test_file.write_bytes(test_file.read_bytes().replace(b"b", b"c", 1))
    with pytest.raises(UserError, match="must have words of the training text, got 1 others"):
        read_wikitext2(tmp_path, 40, 40, vocabulary=5)


def test_translations_are_packed_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is source and shifted target; the references as hypotheses have BLEU 100."""
    sacrebleu = pytest.importorskip("sacrebleu")
    write_multi30k(tmp_path)
    corpus = read_multi30k(tmp_path, num_train=6, num_test=2)
    row = corpus.data.train_inputs[torch.tensor([0])][0]
    target = corpus.data.train_targets[torch.tensor([0])][0]
    assert row.shape == (64,)
    assert row[:6].ne(0).all()
    assert row[5] == 3  # two men , outside . <end>
    assert not row[6:32].any()
    assert row[32] == 2
    assert torch.equal(row[33:], target[:-1])
    words = [corpus.words[token] for token in target.tolist() if token > 3]
    assert words == ["zwei", "männer", "im", "t-shirt", "."]
    hypotheses = [" ".join(words)] * 2
    assert sacrebleu.corpus_bleu(hypotheses, [corpus.references], lowercase=True).score > 99.9

    monkeypatch.setattr("gossamer.workloads.multi30k.read_multi30k", lambda _: corpus)
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
    workload = workloads.find("multi30k-transformer")
    model = workload.make_model().eval()
    assert 0 <= workload.evaluate(model, workload.load()) < 5


@pytest.mark.parametrize("name", FROM_FILES)
def test_prepared_data_are_as_many_as_published(name: str) -> None:
    """On a machine that has the data, counts agree and the model takes a batch."""
    workload = workloads.find(name)
    if not (data_folder() / FROM_FILES[name]).exists():
        pytest.skip(f"{FROM_FILES[name]} is not in {data_folder()}; GOSSAMER_DATA names the folder")
    data = workload.load()
    assert len(data.train_inputs) == len(data.train_targets) == workload.num_train
    chosen = torch.arange(2)
    inputs = augmented(workload.transform, data.train_inputs[chosen], 0)
    loss = workload.loss(workload.make_model()(inputs), data.train_targets[chosen])
    assert torch.isfinite(loss)


class _Server(SimpleHTTPRequestHandler):
    """Serves a folder; understands ranges; breaks off once, after so many bytes."""

    break_after: int | None = None
    requested: list[str | None]

    def do_GET(self) -> None:
        contents = (Path(self.directory) / self.path.lstrip("/")).read_bytes()
        given = self.headers["Range"]
        self.requested.append(given)
        start = int(given.removeprefix("bytes=").removesuffix("-")) if given else 0
        self.send_response(206 if given else 200)
        self.send_header("Content-Length", str(len(contents) - start))
        self.end_headers()
        stop, type(self).break_after = self.break_after, None
        self.wfile.write(contents[start : None if stop is None else start + stop])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web site on this machine: its address and its folder."""
    folder = tmp_path / "site"
    folder.mkdir()
    _Server.requested = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Server, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()
    thread.join()


def sha256(contents: bytes) -> str:
    return f"sha256:{hashlib.sha256(contents).hexdigest()}"


def test_a_file_is_downloaded_once(site: tuple[str, Path], tmp_path: Path) -> None:
    """With the right checksum it is there, and a second call asks for nothing."""
    pytest.importorskip("pooch")
    address, folder = site
    (folder / "a.txt").write_bytes(b"hello")
    source = Source(url=f"{address}/a.txt", files={"set/a.txt": sha256(b"hello")})
    for _ in range(2):
        assert download("x", tmp_path, (source,)) == [tmp_path / "set/a.txt"]
    assert (tmp_path / "set/a.txt").read_bytes() == b"hello"
    assert len(_Server.requested) == 1


def test_an_interrupted_transfer_is_continued(site: tuple[str, Path], tmp_path: Path) -> None:
    """What has arrived is kept aside, the next call asks only for the rest, and says how far."""
    pytest.importorskip("pooch")
    address, folder = site
    contents = os.urandom(300_000)
    (folder / "a.txt").write_bytes(contents)
    source = Source(url=f"{address}/a.txt", files={"set/a.txt": sha256(contents)})
    _Server.break_after = 100_000
    with pytest.raises(UserError, match=r"run the same command again to continue"):
        download("x", tmp_path, (source,))
    assert not (tmp_path / "set/a.txt").exists()
    told: list[tuple[int, int]] = []
    download("x", tmp_path, (source,), progress=lambda *now: told.append(now))
    assert (tmp_path / "set/a.txt").read_bytes() == contents
    assert told[0][0] > 90_000
    assert told[-1] == (300_000, 300_000)
    first, second = _Server.requested
    assert first is None
    assert second is not None
    assert 80_000 < int(second.removeprefix("bytes=").removesuffix("-")) <= 100_000


def test_a_changed_file_is_refused(site: tuple[str, Path], tmp_path: Path) -> None:
    """A wrong checksum, of an archive or of a file, leaves nothing under the file's name."""
    pytest.importorskip("pooch")
    address, folder = site
    (folder / "a.txt").write_bytes(b"other")
    source = Source(url=f"{address}/a.txt", files={"set/a.txt": sha256(b"hello")})
    with pytest.raises(UserError, match=r"set/a\.txt from .* must have the checksum sha256:2cf2"):
        download("x", tmp_path, (source,))
    source = Source(
        url=f"{address}/a.txt", files={"set/a.txt": sha256(b"other")}, checksum="md5:" + "0" * 32
    )
    with pytest.raises(UserError, match="as published, and disk space"):
        download("x", tmp_path, (source,))
    assert not (tmp_path / "set").exists() or not any((tmp_path / "set").iterdir())
    assert not any((tmp_path / ".transfers").iterdir())


def test_a_folder_that_cannot_be_written_is_named(site: tuple[str, Path], tmp_path: Path) -> None:
    """The message has the folder, the reason, and what to do by hand."""
    pytest.importorskip("pooch")
    (tmp_path / "file").write_bytes(b"")
    source = Source(url=f"{site[0]}/a.txt", files={"set/a.txt": sha256(b"hello")})
    with pytest.raises(UserError, match=r"space in .*/file, got .*Not a directory.* set/a\.txt"):
        download("x", tmp_path / "file", (source,))


@pytest.mark.parametrize("kind", ["tar.gz", "zip", "gz"])
def test_archives_are_unpacked(kind: str, site: tuple[str, Path], tmp_path: Path) -> None:
    """Files that a source names come out of its archive; a damaged archive is refused."""
    pytest.importorskip("pooch")
    address, folder = site
    buffer = io.BytesIO()
    if kind == "tar.gz":
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            member = tarfile.TarInfo("set/a.txt")
            member.size = 5
            tar.addfile(member, io.BytesIO(b"hello"))
    elif kind == "zip":
        with zipfile.ZipFile(buffer, "w") as zipped:
            zipped.writestr("set/a.txt", b"hello")
    else:
        buffer.write(gzip.compress(b"hello"))
    archive = folder / f"a.{kind}"
    archive.write_bytes(b"damaged")
    source = Source(url=f"{address}/a.{kind}", files={"set/a.txt": sha256(b"hello")})
    with pytest.raises(UserError, match="an archive that cannot be read"):
        download("x", tmp_path, (source,))
    archive.write_bytes(buffer.getvalue())
    download("x", tmp_path, (source,))
    assert (tmp_path / "set/a.txt").read_bytes() == b"hello"


def test_the_command_names_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`gossamer data` takes a data set or a workload, a folder or the usual one; prints paths."""
    monkeypatch.setitem(
        DATA_SETS,
        "shakespeare",
        (Source(url="http://127.0.0.1:9/none", files={"a.txt": sha256(b"hello")}),),
    )
    (tmp_path / "a.txt").write_bytes(b"hello")
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
    data_command("shakespeare-gpt")
    data_command("shakespeare", tmp_path)
    assert capsys.readouterr().out == f"{tmp_path / 'a.txt'}\n" * 2


def test_downloads_are_by_https_and_sha256() -> None:
    """Neither a transfer nor a checksum is one that somebody in between could forge."""
    for source in itertools.chain(*DATA_SETS.values()):
        assert source.url.startswith("https://")
        named = [*source.files.values(), *([source.checksum] if source.checksum else [])]
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", checksum) for checksum in named)


def test_https_is_not_left_for_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirection to http is refused, and nothing is kept of it."""
    requests = pytest.importorskip("requests")
    pytest.importorskip("pooch")
    answer = requests.Response()
    answer.status_code, answer.url, answer.raw = 200, "http://other/a", io.BytesIO(b"hello")
    monkeypatch.setattr(requests, "get", lambda *args, **options: answer)
    source = Source(url="https://site/a.txt", files={"a.txt": sha256(b"hello")})
    with pytest.raises(UserError, match="http://other/a, which is not https"):
        download("x", tmp_path, (source,))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_data_sets_go_by_their_own_name_and_by_those_of_workloads() -> None:
    """Every workload that reads files leads to its data set, or to where to register."""
    for name in FROM_FILES:
        if name == "imagenet-resnet50":
            with pytest.raises(UserError, match=r"registration at https://image-net.org"):
                find_data_set(name)
        else:
            assert name.startswith(find_data_set(name))
    with pytest.raises(UserError, match=r"the digits .* need none\), got 'digits-mlp'"):
        find_data_set("digits-mlp")
