import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch

from relax.data.samples import Sequences
from relax.megatron import checkpoint
from relax.megatron.checkpoint_part import Part
from relax.megatron.optimizer import OptimizerConfig
from relax.megatron.trainer import Trainer
from tests.megatron.conftest import MODEL
from tests.megatron.test_trainer import WeightedLoss, weights_of

MakeTrainer = Callable[..., Trainer]
DECAYING = OptimizerConfig(total_steps=8, lr=1e-2, lr_warmup_steps=2, lr_decay_style="cosine", weight_decay=0.01)


def test_a_resumed_run_is_the_undisturbed_run_to_the_bit(
    make_trainer: MakeTrainer, sequences: Sequences, tmp_path: Path
) -> None:
    loss = WeightedLoss(sequences)
    undisturbed = make_trainer(optimizer=DECAYING)
    for _ in range(3):
        undisturbed.update(sequences, loss)
    checkpoint.save(tmp_path, undisturbed, {}, step=3, keep=1)
    expected = [undisturbed.update(sequences, loss) for _ in range(3)]

    resumed = make_trainer(optimizer=DECAYING, seed=99)
    resumed.update(sequences, loss)  # whatever it did before is forgotten
    checkpoint.load(checkpoint.latest(tmp_path) or tmp_path, resumed)
    assert [resumed.update(sequences, loss) for _ in range(3)] == expected
    assert all(map(torch.equal, weights_of(undisturbed), weights_of(resumed)))


def test_what_the_caller_adds_comes_back(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    extra = {"generator": generator.get_state(), "step": 7, "order": [3, 1, 2], "config": {"lr": 0.1, "name": "x"}}
    path = checkpoint.save(tmp_path, make_trainer(), extra, step=7, keep=1)
    loaded = checkpoint.load(path, make_trainer())
    assert torch.equal(loaded.pop("generator"), extra.pop("generator"))  # type: ignore[arg-type]
    assert loaded == extra


def test_only_the_newest_are_kept(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    assert checkpoint.latest(tmp_path) is None
    for step in (8, 9, 10, 100):
        checkpoint.save(tmp_path, trainer, {}, step=step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000100"


def _full_on_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)


def _full_on_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "rename", refuse)


def _full_on_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", refuse)


@pytest.mark.parametrize("break_disk", [_full_on_sync, _full_on_rename, _full_on_open])
def test_a_full_disk_leaves_the_older_checkpoint_intact(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    break_disk: Callable[[pytest.MonkeyPatch], None],
) -> None:
    trainer = make_trainer()
    older = checkpoint.save(tmp_path, trainer, {"step": 1}, step=1, keep=1)
    contents = {path.name: path.read_bytes() for path in older.iterdir()}
    with monkeypatch.context() as patch:
        break_disk(patch)
        with pytest.raises(checkpoint.CheckpointError, match=r"step-00000002.*No space left on device.*make room"):
            checkpoint.save(tmp_path, trainer, {"step": 2}, step=2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert {path.name: path.read_bytes() for path in older.iterdir()} == contents
    assert checkpoint.load(older, trainer) == {"step": 1}
    checkpoint.save(tmp_path, trainer, {"step": 2}, step=2, keep=1)


def test_what_a_killed_process_left_is_neither_found_nor_kept(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    checkpoint.save(tmp_path, trainer, {}, step=1, keep=3)
    (tmp_path / ".step-00000002.abcd").mkdir()
    (tmp_path / "step-00000003").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
    checkpoint.save(tmp_path, trainer, {}, step=3, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_checkpoint_that_does_not_fit_or_is_broken_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, make_trainer(), {}, step=1, keep=1)
    with pytest.raises(checkpoint.CheckpointError, match="could not load checkpoint"):
        checkpoint.load(path, make_trainer(attrs.evolve(MODEL, ffn_hidden_size=64)))
    with pytest.raises(checkpoint.CheckpointError, match=r"could not load checkpoint.*word_embeddings"):
        checkpoint.load(path, make_trainer(attrs.evolve(MODEL, vocab_size=MODEL.vocab_size - 1)))
    (path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(checkpoint.CheckpointError, match="could not load checkpoint"):
        checkpoint.load(path, make_trainer())
    with pytest.raises(checkpoint.CheckpointError, match="not a complete checkpoint"):
        checkpoint.load(tmp_path, make_trainer())


def test_written_behind_is_what_was_there_when_it_began(
    make_trainer: MakeTrainer, sequences: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on while the file is being written; what is loaded is as if it had not."""
    trainer, loss, go_on = make_trainer(optimizer=DECAYING), WeightedLoss(sequences), threading.Event()
    write = Part.write

    def slowly(self: Part) -> None:
        assert go_on.wait(60)
        write(self)

    monkeypatch.setattr(Part, "write", slowly)
    trainer.update(sequences, loss)
    expected = [weight.clone() for weight in weights_of(trainer)]
    writing = checkpoint.begin(tmp_path, trainer, {"step": 1}, step=1, keep=1, behind=True)
    following = trainer.update(sequences, loss)
    assert checkpoint.latest(tmp_path) is None
    go_on.set()
    path = writing.finish()
    assert path == checkpoint.latest(tmp_path)

    resumed = make_trainer(optimizer=DECAYING, seed=99)
    assert checkpoint.load(path, resumed) == {"step": 1}
    assert all(map(torch.equal, weights_of(resumed), expected))
    assert resumed.update(sequences, loss) == following


def test_a_fault_behind_the_training_is_told_at_the_end(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    checkpoint.save(tmp_path, trainer, {}, step=1, keep=1)
    with monkeypatch.context() as patch:
        _full_on_sync(patch)
        writing = checkpoint.begin(tmp_path, trainer, {}, step=2, keep=1, behind=True)
        with pytest.raises(checkpoint.CheckpointError, match=r"step-00000002.*No space left on device.*make room"):
            writing.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_killed_between_the_two_renames(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is replaced is there under one name or another, at every moment."""
    trainer = make_trainer()
    path = checkpoint.save(tmp_path, trainer, {"turn": 1}, step=1, keep=1)
    rename = Path.rename

    def killed(self: Path, target: Path) -> None:
        if self.name.endswith(".unfinished"):
            raise OSError(errno.EIO, "killed")
        rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(checkpoint.CheckpointError):
            checkpoint.save(tmp_path, trainer, {"turn": 2}, step=1, keep=1)
    assert not path.exists()
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert checkpoint.load(found, trainer) == {"turn": 1}
    assert checkpoint.at_step(tmp_path, 1) == found
    checkpoint.save(tmp_path, trainer, {"turn": 2}, step=2, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert checkpoint.load(path, trainer) == {"turn": 1}
    checkpoint.save(tmp_path, trainer, {"turn": 3}, step=1, keep=2)
    assert checkpoint.load(path, trainer) == {"turn": 3}
