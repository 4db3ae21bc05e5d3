"""Where data sets are published, and how to download them.

Nothing is downloaded implicitly. Files are atomic: one appears under its name only when it is
complete and its checksum is right; an interrupted transfer is continued by the next call.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast, final

from gossamer.errors import UserError, nearest
from gossamer.extras import needed_by
from gossamer.files import write_atomic

_TIMEOUT_S = 60
_UNREADABLE = (
    *(KeyError, EOFError, zlib.error),
    *(gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile),
)
"""Exceptions of damaged or unexpected archives."""

_BLOCK_BYTES = 1 << 14
"""Chunk size in bytes, the most that an interruption loses."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One published file, and the files that it becomes."""

    url: str
    files: dict[str, str]
    """Checksums (``sha256:...``) by path in the data folder; of an archive, paths
    end as those of its members."""

    checksum: str | None = None
    """Of the published file, where it is an archive and its authors name one."""


def _fashion(name: str, sha256: str) -> Source:
    # The authors' repository: the other site that they name has no https.
    site = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
    return Source(url=f"{site}/{name}", files={f"fashion-mnist/{name}": f"sha256:{sha256}"})


def _multi30k(name: str, sha256: str) -> Source:
    site = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
    return Source(url=f"{site}/{name}.gz", files={f"multi30k/{name}": f"sha256:{sha256}"})


# Of files whose MD5 is the one that their authors publish (CIFAR-10, Fashion-MNIST), or whose
# published counts of lines and tokens were checked.
DATA_SETS: dict[str, tuple[Source, ...]] = {
    "fashion-mnist": (
        _fashion(
            "train-images-idx3-ubyte.gz",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        _fashion(
            "train-labels-idx1-ubyte.gz",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        _fashion(
            "t10k-images-idx3-ubyte.gz",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        _fashion(
            "t10k-labels-idx1-ubyte.gz",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
    "cifar10": (
        Source(
            url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            checksum="sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            files={
                "cifar-10-batches-bin/data_batch_1.bin": "sha256:"
                "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                "cifar-10-batches-bin/data_batch_2.bin": "sha256:"
                "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                "cifar-10-batches-bin/data_batch_3.bin": "sha256:"
                "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                "cifar-10-batches-bin/data_batch_4.bin": "sha256:"
                "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                "cifar-10-batches-bin/data_batch_5.bin": "sha256:"
                "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
                "cifar-10-batches-bin/test_batch.bin": "sha256:"
                "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
            },
        ),
    ),
    "wikitext2": (
        Source(
            url="https://wikitext.smerity.com/wikitext-2-v1.zip",
            checksum="sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
            files={
                "wikitext-2/wiki.train.tokens": "sha256:"
                "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
                "wikitext-2/wiki.valid.tokens": "sha256:"
                "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
                "wikitext-2/wiki.test.tokens": "sha256:"
                "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
            },
        ),
    ),
    "shakespeare": (
        Source(
            url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
            "/input.txt",
            files={
                "tinyshakespeare/input.txt": "sha256:"
                "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
            },
        ),
    ),
    "multi30k": (
        _multi30k("train.en", "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6"),
        _multi30k("train.de", "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72"),
        _multi30k(
            "test_2016_flickr.en",
            "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
        ),
        _multi30k(
            "test_2016_flickr.de",
            "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
        ),
    ),
}


def find_data_set(name: str) -> str:
    """Return a data set by its name or by that of a workload that uses it."""
    for data_set in DATA_SETS:
        if name == data_set or name.startswith(f"{data_set}-"):
            return data_set
    if name.split("-")[0] == "imagenet":
        raise UserError(
            "ImageNet needs a registration at https://image-net.org, so that it cannot be "
            "downloaded here; unpack it as imagenet/train/CLASS/*.JPEG and imagenet/val/CLASS/*"
        )
    raise UserError(
        f"data must be those of {', '.join(DATA_SETS)} or of a workload that uses them (quadratic, "
        f"the digits and stdlib-gpt need none), got {name!r}; {nearest(name, DATA_SETS)}"
    )


def download(
    name: str,
    folder: Path,
    sources: tuple[Source, ...] | None = None,
    report: Callable[[str], object] = lambda line: None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[Path]:
    """Download the missing files of a data set; return all of its files.

    Args:
        name: of a data set, or of a workload that uses it.
        folder: that contains all data sets.
        sources: of the data set; by default the published ones.
        report: called with what is being downloaded.
        progress: called with the bytes so far and their total, 0 where it is unknown.
    """
    chosen = DATA_SETS[find_data_set(name)] if sources is None else sources
    with needed_by("downloads need"):
        import pooch
    transfers = folder / ".transfers"
    pooch.get_logger().setLevel("WARNING")  # its advice is for programmers
    for source in chosen:
        if all(_is_right(folder / name, checksum) for name, checksum in source.files.items()):
            continue
        report(f"downloading {source.url}")
        try:
            transfers.mkdir(parents=True, exist_ok=True)
            archive = pooch.retrieve(
                source.url,
                source.checksum,
                fname=_file_name(source.url),
                path=transfers,
                downloader=cast("Any", partial(_continue, progress=progress)),
            )
            _unpack(Path(archive), source, folder)
            Path(archive).unlink()
        except UserError:
            raise
        except (OSError, ValueError) as error:  # pooch: ValueError for a wrong checksum
            raise UserError(
                f"a download needs {source.url} as published, and disk space in {folder}, got "
                f"{error}; run the same command again to continue, or put "
                f"{', '.join(source.files)} there yourself"
            ) from error
    return [folder / name for source in chosen for name in source.files]


def _continue(
    url: str, output_file: str, _pooch: Any, *, progress: Callable[[int, int], object]
) -> None:
    """Download for pooch, resuming an interrupted transfer."""
    import requests

    part = Path(output_file).parent / f"{_file_name(url)}.part"
    done = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT_S) as response:
        if response.status_code == requests.codes.requested_range_not_satisfiable:
            part.unlink()
            return _continue(url, output_file, _pooch, progress=progress)
        response.raise_for_status()
        if url.startswith("https:") and not response.url.startswith("https:"):
            raise OSError(f"a redirection to {response.url}, which is not https")
        continued = response.status_code == requests.codes.partial_content
        rest = int(response.headers.get("Content-Length", 0))
        with part.open("ab" if continued else "wb") as file:
            total = file.tell() + rest if rest else 0
            for block in response.iter_content(_BLOCK_BYTES):
                file.write(block)
                progress(file.tell(), total)
    os.replace(part, output_file)


def _file_name(url: str) -> str:
    """Return the name of a transfer's file, the same in the next call, which resumes it."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


def _unpack(archive: Path, source: Source, folder: Path) -> None:
    """Check and write the files of a source."""
    for name, contents in _members(archive, source):
        if not _matches(io.BytesIO(contents), source.files[name]):
            archive.unlink()
            raise UserError(
                f"{name} from {source.url} must have the checksum {source.files[name]}, and has "
                "another; its authors may have changed it: see where else it is published"
            )
        write_atomic(folder / name, lambda aside, contents=contents: aside.write_bytes(contents))


def _members(archive: Path, source: Source) -> Iterator[tuple[str, bytes]]:
    try:
        if source.url.endswith(".tar.gz"):
            with tarfile.open(archive) as tar:
                for name in source.files:
                    member = tar.extractfile(name)
                    yield name, member.read() if member else b""
        elif source.url.endswith(".zip"):
            with zipfile.ZipFile(archive) as zipped:
                for name in source.files:
                    yield name, zipped.read(name)
        else:
            (name,) = source.files
            contents = archive.read_bytes()
            unpack = source.url.endswith(".gz") and not name.endswith(".gz")
            yield name, gzip.decompress(contents) if unpack else contents
    except _UNREADABLE as error:
        archive.unlink()
        raise OSError(f"an archive that cannot be read ({error})") from error


def _is_right(path: Path, checksum: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _matches(file, checksum)


def _matches(file: BinaryIO, checksum: str) -> bool:
    algorithm, _, expected = checksum.partition(":")
    return hashlib.file_digest(cast("Any", file), algorithm).hexdigest() == expected
