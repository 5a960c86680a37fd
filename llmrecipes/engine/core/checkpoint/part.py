"""What a rank needs to go on, in a file of its own: replicas too, so that no file of another rank is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from llmrecipes.checkpoint.manifest import digest
from llmrecipes.checkpoint.state_format import StateDict, Written
from llmrecipes.engine.core.checkpoint.format import RankFiles, ShardedFormat, write_file
from llmrecipes.engine.core.checkpoint.index import INDEX_NAME, encode
from llmrecipes.engine.core.checkpoint.loader import COMMON_OBJECT
from llmrecipes.io import write_synced

FILE = "part.distcp"


class PartFormat(ShardedFormat):
    """`ShardedFormat` of the state of one rank, which reads it as a checkpoint that has nothing else."""

    def snapshot(self, state: StateDict) -> StateDict:
        apply_factories(state)
        return super().snapshot(dict_list_map_outplace(_as_written_here, state))

    def prepare(self, taken: StateDict, directory: Path, rank: int) -> RankFiles:
        directory.mkdir(parents=True)
        sharded, common = extract_sharded_base(load_preprocess(taken)[0])
        tensors: list[ShardedTensor] = []
        objects: dict[str, list[Any]] = {COMMON_OBJECT: [common]}
        for shard in nested_values(sharded):
            if isinstance(shard, ShardedTensor):
                tensors.append(shard)
            else:
                objects.setdefault(shard.unique_key, []).append(shard.data)
        return RankFiles(tensors, objects)

    def write(self, prepared: RankFiles, directory: Path, rank: int) -> Written:
        record, index = write_file(directory / FILE, prepared.tensors, prepared.objects)
        write_synced(directory / INDEX_NAME, encode(index))
        return Written({FILE: record, INDEX_NAME: digest(directory / INDEX_NAME)}, b"")


def _as_written_here(value: Any) -> Any:
    return replace(value, replica_id=0) if isinstance(value, ShardedTensor | ShardedObject) else value
