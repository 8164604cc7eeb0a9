"""Target and drafter in one folder: links, digests, nothing foreign touched."""

from __future__ import annotations

import hashlib
import json

import pytest

from specgraft.export.bundle import NOTE, bundle


@pytest.fixture
def parts(tmp_path):
    target, drafter = tmp_path / "target", tmp_path / "export"
    target.mkdir()
    drafter.mkdir()
    (target / "model.safetensors").write_bytes(b"weights")
    (target / "config.json").write_text("{}")
    (drafter / "model.safetensors").write_bytes(b"draft")
    return target, drafter, tmp_path / "export-bundle"


def test_the_target_is_linked_and_unchanged(parts, capsys):
    target, drafter, folder = parts
    note = bundle(folder, target, drafter, "dspark")
    digest = hashlib.sha256(b"weights").hexdigest()
    assert note["target_sha256"] == {"model.safetensors": digest} and note["unchanged"] is True
    assert json.loads((folder / NOTE).read_text()) == note
    assert (folder / "model.safetensors").is_symlink() and (folder / "model.safetensors").resolve() == target / "model.safetensors"
    assert (folder / "dspark" / "model.safetensors").read_bytes() == b"draft"
    said = capsys.readouterr().err
    assert digest[:12] in said and "weights unchanged" in said


def test_it_is_made_anew_and_the_target_survives(parts):
    target, drafter, folder = parts
    bundle(folder, target, drafter, "dspark")
    (drafter / "model.safetensors").write_bytes(b"newer")
    bundle(folder, target, drafter, "dspark")
    assert (folder / "dspark" / "model.safetensors").read_bytes() == b"newer"
    assert (target / "model.safetensors").read_bytes() == b"weights"


def test_one_gguf_file_can_be_the_target(parts):
    target, drafter, folder = parts
    file = target / "t.gguf"
    file.write_bytes(b"g")
    bundle(folder, file, drafter, "dspark")
    assert sorted(path.name for path in folder.iterdir()) == ["dspark", NOTE, "t.gguf"]


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors"])
def test_foreign_files_are_never_deleted(parts, name):
    target, drafter, folder = parts
    folder.mkdir()
    (folder / name).write_text("mine")
    with pytest.raises(ValueError, match=f"holds {name}, which export did not write"):
        bundle(folder, target, drafter, "dspark")
    assert (folder / name).read_text() == "mine"


def test_notes_put_into_a_bundle_are_kept(parts):
    target, drafter, folder = parts
    bundle(folder, target, drafter, "dspark")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes\.txt"):
        bundle(folder, target, drafter, "dspark")
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_target_that_is_not_here(parts, tmp_path):
    _, drafter, folder = parts
    with pytest.raises(ValueError, match="no folder or file here"):
        bundle(folder, tmp_path / "absent", drafter, "dspark")
    assert not folder.exists()
