"""Files of a model that are links, pipes or devices: links of a hub's cache work, everything else is a clear error."""

import os
import shutil

import pytest

from offload.errors import TriforceError
from offload.loading.hub.download import dimensions, open_checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def opened(path):
    checkpoint = open_checkpoint(path)
    assert checkpoint.sizes()
    return checkpoint.load_tokenizer().encode("the end", special_tokens=True)


@pytest.fixture
def folder(tmp_path, tiny_model_dir):
    """As in a hub's cache: each file is a link to a blob in another folder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    shutil.copytree(tiny_model_dir, blobs)
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def test_a_folder_of_links_works(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert opened(tmp_path / "link")
    assert dimensions(str(tmp_path / "link")).layers


def dangling(path):
    path.symlink_to("nowhere")


def loop(path):
    path.symlink_to(path.name)


def zeros(path):
    path.symlink_to("/dev/zero")


REPLACEMENTS = [dangling, loop, zeros, os.mkfifo, os.mkdir]


@pytest.mark.parametrize("replacement", REPLACEMENTS, ids=lambda each: each.__name__)
def test_what_is_no_regular_file_is_an_error(folder, tmp_path, replacement):
    """A pipe would be waited for, and a device read until memory ends."""
    for name in FILES:
        file = folder / name
        kept = file.readlink() if file.is_symlink() else None
        file.unlink(missing_ok=True)
        replacement(file)
        for use in (opened, lambda path: dimensions(str(path))):
            with pytest.raises(TriforceError, match=name) as caught:
                use(folder)
            assert caught.value.hint and "\n" not in caught.value.message
        file.rmdir() if replacement is os.mkdir else file.unlink()
        if kept:
            file.symlink_to(kept)
    assert opened(folder)
    if replacement is not os.mkdir:
        for name in ("model", "model.gguf"):
            replacement(tmp_path / name)
            with pytest.raises(TriforceError, match=name):
                opened(tmp_path / name)
