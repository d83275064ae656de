"""A trace of a training step names what each unit and the optimizer do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from figures import COMMITTED, read_labels
from matrixtitan.config import Config, load_config
from matrixtitan.trainer import Trainer
from tests.lib.distributed import run_distributed

CONFIG = """
[job]
dump_folder = "{folder}"

[model]
flavor = "debug"

[data]
sources = [{{ type = "text", path = ["{folder}/*.txt"] }}]
cache_dir = "{folder}"
num_workers = 0

[training]
steps = 4
seq_len = 16
local_batch_size = 2
global_batch_size = 4
mixed_precision_param = "float32"

[lr_scheduler]
warmup_steps = 1

[profiling]
enable_profiling = true
profile_freq = 4

[parallelism]
data_parallel_replicate_degree = {replicas}
"""


def train(config: Config) -> list[str]:
    """Names of the model's units."""
    with Trainer(config) as trainer:
        trainer.train()
        return ["+".join(names) for names in trainer.model.unit_names()]


@pytest.mark.parametrize("replicas", [1, 2], ids=["2 shards", "2 replicas"])
def test_a_trace_of_one_step_lists_every_unit(tmp_path: Path, replicas: int) -> None:
    (tmp_path / "text.txt").write_text("Each matrix lies whole on one rank, its owner.\n" * 400)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(folder=tmp_path, replicas=replicas))
    units, _ = run_distributed(train, 2, load_config(["--config", str(path)]), timeout=120)
    for rank in range(2):
        (trace,) = tmp_path.rglob(f"step_4/rank_{rank}.json")
        events = json.loads(trace.read_text())["traceEvents"]
        names = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
        assert names["optimizer::step"] == 1
        if replicas == 1 and rank == 0:
            order = [(label.event, label.unit) for label in read_labels(trace)]
            recorded = json.loads((COMMITTED / "timeline.json").read_text())["labels"]
            assert order == [(label["event"], label["unit"]) for label in recorded]
        for unit in units:
            # the embedding's backward needs no weights, and the last unit is kept
            gathers = 1 if unit in (units[0], units[-1]) else 2
            assert names[f"matrix_fsdp::unshard {unit}"] == gathers, unit
            assert names[f"matrix_fsdp::unshard_wait {unit}"] == gathers, unit
            assert names[f"matrix_fsdp::reduce {unit}"] == 1, unit
            assert names[f"matrix_fsdp::reduce_wait {unit}"] == 1, unit
        reduced = {name for name in names if name.startswith("matrix_fsdp::all_reduce ")}
        assert reduced == (
            {f"matrix_fsdp::all_reduce {u}" for u in units} if replicas > 1 else set()
        )
