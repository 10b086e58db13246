"""A rank's part of a checkpoint in Megatron's torch_dist format: taken at once, written whenever it suits."""

import pickle
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import distributed
from torch.distributed.checkpoint.filesystem import FileSystemWriter


class Part(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """What `dist_checkpointing.save` calls a strategy: its `save` takes this rank's part, `write` writes it.

    Neither speaks to another rank, so a thread may write while the training goes on, and neither forks, which would
    cost seconds and hide the error of a full disk. What rank 0 must know for `complete`, the others leave in a file.
    With `copy`, the part is a copy that training does not change.
    """

    def __init__(self, *, copy: bool) -> None:
        super().__init__("torch_dist", 1)
        self.copy = copy
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        if self.copy:
            for shards in state.values():
                for shard in shards:
                    if isinstance(shard, ShardedTensor):
                        shard.data = shard.data.detach().to("cpu", copy=True)
        self.directory = Path(checkpoint_dir)
        self._writer = FileSystemWriter(checkpoint_dir, single_file_per_rank=True)
        self._writer.set_up_storage_writer(is_coordinator=self.rank == 0)
        self._planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._planner.set_up_planner(mcore_to_pyt_state_dict(state, False), is_coordinator=self.rank == 0)
        plan = self._planner.create_local_plan()
        self._plan = self._writer.prepare_global_plan([plan] * self.size)[self.rank]  # names this rank's files

    def write(self) -> None:
        """Write the part. Errors: OSError, RuntimeError."""
        self._results = self._writer.write_data(self._plan, self._planner).value()
        if self.rank != 0:
            self._notes(self.rank).write_bytes(pickle.dumps((self._plan, self._results)))

    def complete(self) -> None:
        """On rank 0, once all ranks have written: tell in a file what lies where.

        Errors: OSError; ValueError when the parts do not add up to whole tensors.
        """
        parts = [(self._plan, self._results), *(self._noted(rank) for rank in range(1, self.size))]
        plans, results = zip(*parts, strict=True)
        _, metadata = self._planner.create_global_plan(list(plans))
        self._writer.finish(metadata, list(results))

    def _notes(self, rank: int) -> Path:
        return self.directory / f".part-{rank}"

    def _noted(self, rank: int) -> Any:
        path = self._notes(rank)
        noted = pickle.loads(path.read_bytes())
        path.unlink()
        return noted
