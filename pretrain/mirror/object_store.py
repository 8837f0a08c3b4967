"""The copy of one run in a store that fsspec opens by a URL, S3, GCS or a mounted folder.

A copy may be the only one there is, so nothing in it is overwritten part by part. A checkpoint's object is
never replaced: one that has the right contents is left alone, and where it has others, the file gets a second
name. The few small files that change are replaced in one step.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import xxhash

from model.errors import UserError, quote
from pretrain.checkpoint.manifest import Entry
from pretrain.utils.env_check import check_installed
from pretrain.utils.files import CHUNK_BYTES, open_regular, put_file
from pretrain.utils.parsing import MOST_BYTES
from pretrain.utils.run_folder import STEP_FOLDER

PROTOCOLS = {"s3": "s3fs", "gs": "gcsfs", "file": "fsspec"}
"""By a URL's protocol: the package that opens it."""


def check_mirror(url: str) -> None:
    """Reject a URL that cannot be opened here; no connection is made.

    Raises:
        UserError: it says what is valid, or what to install.
    """
    parts = urlsplit(url)
    local = parts.scheme == "file"
    placed = parts.path.startswith("/") and parts.path.strip("/") if local else parts.netloc
    if parts.scheme not in PROTOCOLS or not placed or (local and parts.netloc):
        raise UserError(
            f"checkpoint.mirror: {quote(url)} is not valid; give a URL such as s3://bucket/folder, "
            "gs://bucket/folder or file:///folder"
        )
    check_installed(PROTOCOLS[parts.scheme], "checkpoint.mirror")


class Store:
    """The copy of one run in a store. One process at a time writes it.

    Raises:
        Exception: what fsspec raises, of any class, from every method.
    """

    def __init__(self, url: str, run: str) -> None:
        from fsspec.core import url_to_fs

        self.files, root = url_to_fs(url.rstrip("/"), use_listings_cache=False, skip_instance_cache=True)
        self.root = f"{root}/{run}"
        self._is_folder = "file" in self.files.protocol

    def put(self, local: Path, name: str, entry: Entry) -> str:
        """Copy a file of a checkpoint, and read it back, unless its contents are there already.

        Args:
            entry: the size and hash that the file has.

        Returns:
            The name under which they lie: *name*, or *name* and the hash where *name* holds something else,
            which may belong to the only whole copy of an earlier checkpoint of that step.

        Raises:
            OSError: the file, or what comes back of it, is not what *entry* says.
        """
        with_hash = f"{name}.{entry.xxh3_128}"
        for place in (name, with_hash):
            if self._holds(place, entry):
                return place
        place = with_hash if self.files.exists(self._path(name)) else name
        with open_regular(local) as source:
            self._write(source, place, entry)
        return place

    def replace(self, content: bytes, name: str) -> None:
        """Write a small file in place of an existing one, in one step, and read it back."""
        entry = Entry(len(content), xxhash.xxh3_128_hexdigest(content))
        self._write(io.BytesIO(content), name, entry)

    def _write(self, source: Any, name: str, entry: Entry) -> None:
        """Write an object that appears whole, or not at all if this is interrupted anywhere."""
        path = written = self._path(name)
        with ExitStack() as stack:
            if self._is_folder:  # a file gets its name by a rename, once it was read back
                path_of_file = Path(path)
                path_of_file.parent.mkdir(parents=True, exist_ok=True)
                written = str(path_of_file.with_name(f".writing_{path_of_file.name}"))
            else:
                # An object of S3 and GCS appears when its upload is completed. Without a transaction, fsspec
                # would complete it even after an error.
                stack.enter_context(self.files.transaction)
            with self.files.open(written, "wb") as target:
                shutil.copyfileobj(source, target, CHUNK_BYTES)
        if self._digest(written) != entry.xxh3_128:
            raise OSError(f"{name} does not come back with the contents that it should have")
        if self._is_folder:
            put_file(Path(written), Path(path))

    def _holds(self, name: str, entry: Entry) -> bool:
        """Whether an object has the contents that *entry* describes."""
        try:
            size = self.files.info(self._path(name))["size"]
            return bool(size == entry.bytes and self._digest(self._path(name)) == entry.xxh3_128)
        except FileNotFoundError:
            return False

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _digest(self, path: str) -> str:
        digest = xxhash.xxh3_128()
        with self.files.open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def get(self, name: str, local: Path, each: Callable[[int], object] = lambda size: None) -> None:
        """Fetch a file. *each* is called with the bytes of each part that has come."""
        local.parent.mkdir(parents=True, exist_ok=True)
        with self.files.open(self._path(name), "rb") as source, local.open("wb") as target:
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
                each(len(chunk))

    def text(self, name: str) -> str | None:
        """A small file; None if it is not there."""
        try:
            with self.files.open(self._path(name), "rb") as file:
                return str(file.read(MOST_BYTES).decode("utf-8"))
        except FileNotFoundError:
            return None

    def checkpoints(self) -> list[str]:
        """Names of checkpoint folders, whole or not."""
        try:
            listed = self.files.ls(self._path("checkpoints"), detail=False)
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rpartition("/")[2] for path in listed]
        return sorted(filter(STEP_FOLDER.fullmatch, names), key=lambda name: int(name.partition("_")[2]))
