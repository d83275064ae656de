"""What a run can be told: one frozen table of options per TOML section.

Every key's type, default, meaning and range stand once, here; the keys of an optimizer's rule stand
in `matrixtitan/rules/`. Names follow torchtitan where it has the key. `problems` says, without
torch, which values cannot be; whoever takes a section asks it too. Next: `load.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from matrixtitan.options import Needs, Options, key, not_one_of
from matrixtitan.plan.transports import TRANSPORTS
from matrixtitan.rules import RULES, MuonRule, Rule
from matrixtitan.rules.base import check_betas

Dtype = Literal["float32", "bfloat16"]

OWNED = Needs("parallelism.strategy", ("matrix_fsdp",))
SHARDED = Needs("parallelism.strategy", ("matrix_fsdp", "fsdp2"))
RIVAL = Needs("parallelism.strategy", ("fsdp2",))


@dataclass(frozen=True)
class JobConfig(Options):
    dump_folder: str = key("./outputs", "folder of everything that the run writes")
    description: str = key("", "free text, logged and saved with the run")


@dataclass(frozen=True)
class ModelConfig(Options):
    name: str = key("llama3", "model family")
    flavor: str = key(
        "debug",
        "size of the model: debug, 150M, 1B, 8B, 32B, 70B or 405B; bench and netlab are for "
        "measurements",
    )
    tokenizer_path: str = key(
        "",
        "a tiktoken rank file, or a folder that contains tokenizer.model; empty: the tokenizer "
        "that ships with matrixtitan",
    )
    tokenizer_pattern: Literal["", "llama3", "gpt2", "o200k", "qwen2"] = key(
        "",
        "how a rank file of no known family splits text into words; BOS and EOS then follow its last "
        "rank. Empty: the pattern of the file's family, or of the mark that tools/train_tokenizer.py "
        "wrote beside it",
    )
    tie_embeddings: bool | None = key(
        None, "one matrix for the embedding and the output head; none: as the flavor has it"
    )


@dataclass(frozen=True)
class DataSource(Options):
    type: Literal["python_stdlib", "text", "jsonl", "shards"] = key(
        "python_stdlib",
        "the Python interpreter's own library; text or JSONL files, plain or .gz; or prepared "
        "token shards",
    )
    path: tuple[str, ...] = key((), "files, folders or globs; python_stdlib takes none")
    weight: float = key(1.0, "share of the windows, relative to the other sources")
    field: str = key("text", "jsonl: the field that holds the text")

    def problems(self) -> Iterator[str]:
        if not 0 < self.weight < float("inf"):
            yield (
                f"weight is {self.weight}; it must be positive and finite: to leave a source out, "
                "remove it"
            )
        if self.type == "python_stdlib" and self.path:
            yield "path is set, but a source of type python_stdlib takes no path"
        if self.type != "python_stdlib" and not self.path:
            yield f"path is empty; a source of type {self.type} needs a path"
        if self.type != "jsonl" and self.field != "text":
            yield f"field is set, but has no effect on a source of type {self.type}"


@dataclass(frozen=True)
class DataConfig(Options):
    sources: tuple[DataSource, ...] = key(
        (DataSource(),), "list of tables {type, path, weight, field}"
    )
    cache_dir: str = key("~/.cache/matrixtitan", "where tokenised text is kept")
    validation_fraction: float = key(
        0.02, "share of the documents held out for validation", low=0, high=1
    )
    on_bad_record: Literal["error", "skip"] = key(
        "error",
        "what to do with a malformed record: stop the run, or skip it and count it. Text files "
        "over 4 MB are split into pieces, and each piece counts as a record",
    )
    num_workers: int = key(
        1, "processes per rank that read ahead; 0 reads in the training process", low=0
    )
    seed: int | None = key(None, "seed of the data's order; none: debug.seed")
    allow_data_change: bool = key(
        False, "resume although the data, or its order, differs from the checkpoint's"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.sources:
            yield ('sources is empty; name at least one source, such as {type = "python_stdlib"}')
        for index, source in enumerate(self.sources):
            yield from (f"sources[{index}].{problem}" for problem in source.problems())


@dataclass(frozen=True)
class TrainingConfig(Options):
    global_batch_size: int = key(
        0, "sequences in a step, over all ranks and microbatches; required"
    )
    steps: int = key(1000, "optimizer steps in the whole run", low=1)
    seq_len: int = key(2048, "tokens in a sequence", low=1)
    local_batch_size: int = key(
        1,
        "sequences in one forward pass of one rank; 0: automatic, which fits any number of ranks (at "
        "most 8192 tokens, or one sequence)",
        low=0,
    )
    max_norm: float = key(
        1.0, "gradients are clipped to this global norm; 0 only measures the norm", low=0
    )
    dtype: Dtype = key("float32", "dtype of stored weights, gradients and optimizer states")
    mixed_precision_param: Dtype = key(
        "bfloat16", "dtype of the weights that are gathered and computed with"
    )
    mixed_precision_reduce: Dtype = key("float32", "dtype in which gradients are summed over ranks")
    gc_freq: int = key(50, "steps between Python garbage collections; 0: never", low=0)
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop",
        "what to do when the loss or the gradient norm is not finite: stop, or skip the step",
    )
    max_consecutive_skips: int = key(
        20,
        "the run stops when it has skipped this many steps in a row",
        low=1,
        needs=Needs("on_nonfinite", ("skip",)),
    )

    def problems(self) -> Iterator[str]:
        if self.global_batch_size < 1:
            yield (
                f"global_batch_size is {self.global_batch_size}; it is required, at least 1: the "
                "number of sequences in a step, over all ranks"
            )
        yield from super().problems()


@dataclass(frozen=True)
class OptimizerGroup(Options):
    pattern: str = key("", "full parameter names, with * and ?")
    lr: float | None = key(None, "their peak learning rate; none: as their role has it", low=0)
    weight_decay: float | None = key(None, "their decay; none: as their role has it", low=0)

    def problems(self) -> Iterator[str]:
        if not self.pattern:
            yield "pattern is empty; write which parameters the group is for"
        yield from super().problems()


@dataclass(frozen=True)
class OptimizerConfig(Options):
    """`rule` is the table [optimizer.NAME]; a `name` alone stands for that rule's defaults."""

    name: str = key("muon", f"what steps the hidden matrices: {', '.join(RULES)}")
    lr: float = key(0.02, "peak learning rate of the matrices", low=0)
    weight_decay: float = key(0.01, "decoupled decay of the matrices", low=0)
    tail_lr: float = key(3e-3, "peak learning rate of everything else, which AdamW steps", low=0)
    tail_weight_decay: float = key(
        0.01, "decoupled decay of everything else; norms and biases have none", low=0
    )
    tail_betas: tuple[float, ...] = key((0.9, 0.95), "AdamW's betas", low=0, below=1)
    tail_eps: float = key(1e-8, "AdamW's epsilon", low=0)
    tail_patterns: tuple[str, ...] = key(
        (), "full names, with * and ?, of further parameters that AdamW steps"
    )
    groups: tuple[OptimizerGroup, ...] = key((), "list of tables {pattern, lr, weight_decay}")
    matrix_exchange: Literal["gather_each", "gather_once", "all_to_all"] = key(
        "all_to_all", "how whole matrices come together under fsdp2", needs=RIVAL
    )
    rule: Rule = field(default_factory=MuonRule)

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise ValueError(not_one_of("name", self.name, RULES))
        rule = RULES[self.name]
        if type(self.rule) is rule:
            return
        if self.rule != type(self.rule)():
            raise ValueError(
                f"name is {self.name!r}, but rule is {self.rule!r}: give a {rule.__name__}"
            )
        object.__setattr__(self, "rule", rule())

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from check_betas("tail_betas", self.tail_betas)
        for index, group in enumerate(self.groups):
            yield from (f"groups[{index}].{problem}" for problem in group.problems())
        yield from (f"{self.name}.{problem}" for problem in self.rule.problems())


@dataclass(frozen=True)
class LRSchedulerConfig(Options):
    warmup_steps: int = key(
        200, "steps of linear rise; step warmup_steps runs at the peak rate", low=0
    )
    total_steps: int | None = key(
        None, "step at which the schedule ends; none: training.steps", low=1
    )
    decay_ratio: float | None = key(
        None,
        "share of the steps that decay, after a stable part; none: all steps after warm-up",
        low=0,
        high=1,
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = key("linear", "shape of the decay")
    min_lr_factor: float = key(
        0.0, "learning rate of the last step, relative to the peak", low=0, high=1
    )

    def problems_in(self, steps: int) -> Iterator[str]:
        """What is wrong with the schedule of a run of `steps` steps; begins with its own problems."""
        yield from self.problems()
        total = steps if self.total_steps is None else self.total_steps
        if total < steps:
            yield (
                f"total_steps {total} ends before training.steps {steps}; raise it with the steps"
            )
        if self.warmup_steps > total:
            yield f"warmup_steps {self.warmup_steps} exceeds the {total} steps; lower it"
        elif (
            self.decay_ratio is not None
            and self.warmup_steps + round(total * self.decay_ratio) > total
        ):
            yield (
                f"warmup_steps {self.warmup_steps} and decay_ratio {self.decay_ratio} of {total} "
                "steps overlap; lower one of them"
            )


@dataclass(frozen=True)
class ParallelismConfig(Options):
    strategy: Literal["matrix_fsdp", "fsdp2", "zero1_owner", "ddp"] = key(
        "matrix_fsdp", "how ranks share the work"
    )
    data_parallel_replicate_degree: int = key(
        1,
        "copies of the weights; each is sharded over the other ranks (HSDP)",
        low=1,
        needs=SHARDED,
    )
    data_parallel_shard_degree: int = key(
        -1, "ranks that share one copy; -1: all that the replicas leave", needs=SHARDED
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = key(
        "default",
        "which gathered weights are freed after forward: all but the last unit's, all, or none",
        needs=SHARDED,
    )
    transport: str = key(
        "auto",
        f"how a unit's weights travel from their owners: auto, {', '.join(TRANSPORTS)}",
        needs=OWNED,
    )
    egress_cap: float = key(
        0.0,
        "upper limit on one rank's share of a unit, as a multiple of the average share; useful "
        "with transport = star across machines; 0 disables it",
        needs=OWNED,
    )
    prefetch: int = key(1, "units gathered ahead", low=0, needs=SHARDED)
    reduce_each_microbatch: bool = key(
        True,
        "reduce gradients after each microbatch; false reduces once a step and needs more memory",
        needs=SHARDED,
    )
    fsdp2_transports: Literal["auto", "tuned", "stock"] = key(
        "auto",
        "collectives under fsdp2: PyTorch's own (stock), or our transports (tuned); auto: tuned on "
        "gloo",
        needs=RIVAL,
    )
    dry_run_world_size: int = key(
        0, "one process runs one rank of a job of this size, without communication", low=0
    )
    dry_run_rank: int = key(0, "the rank that a dry run runs", low=0)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.transport not in ("auto", *TRANSPORTS):
            yield not_one_of("transport", self.transport, ("auto", *TRANSPORTS))
        if self.egress_cap and not 1 <= self.egress_cap < float("inf"):
            yield (
                f"egress_cap is {self.egress_cap}; write 0 for no cap, or 1 (an even share) or more"
            )
        if self.data_parallel_shard_degree != -1 and self.data_parallel_shard_degree < 1:
            yield (
                f"data_parallel_shard_degree is {self.data_parallel_shard_degree}; it must be at "
                "least 1, or -1 for all that the replicas leave"
            )
        if self.dry_run_rank >= max(1, self.dry_run_world_size):
            yield (
                f"dry_run_rank {self.dry_run_rank} is outside dry_run_world_size "
                f"{self.dry_run_world_size}"
            )


@dataclass(frozen=True)
class CheckpointConfig(Options):
    enable: bool = key(False, "save, and resume from the newest checkpoint when started again")
    folder: str = key("checkpoint", "folder inside job.dump_folder")
    interval: int = key(500, "steps between saves", low=1)
    keep_latest_k: int = key(10, "how many checkpoints are kept; 0 keeps all", low=0)
    load_step: int = key(
        -1, "resume from this step's checkpoint; -1: the newest complete one", low=-1
    )
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = key(
        "disabled", "train on while a save is written"
    )
    initial_load_path: str = key(
        "", "a checkpoint to begin from, where there is none to resume from"
    )
    initial_load_model_only: bool = key(True, "take only the weights from initial_load_path")
    exclude_from_loading: tuple[str, ...] = key((), "keys left as they are, with * and ?")
    last_save_model_only: bool = key(False, "the last save holds the weights alone")
    export_dtype: Dtype = key(
        "float32",
        "dtype of a save that holds the weights alone",
        needs=Needs("last_save_model_only", (True,)),
    )
    on_error: Literal["stop", "continue"] = key(
        "stop",
        "what to do when a save fails: end the run, or log it. A failure of the last save always "
        "ends the run",
    )
    skip_corrupt: bool = key(False, "fall back to an older checkpoint where the newest is damaged")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.keep_latest_k == 1:
            yield (
                "keep_latest_k is 1; keep at least 2, since the newest may be incomplete "
                "(0 keeps all)"
            )
        if self.initial_load_path and not self.enable:
            yield "initial_load_path is set, but checkpoint.enable is false; set it to true"
        if not self.initial_load_model_only and not self.initial_load_path:
            yield "initial_load_model_only is set, but has no effect without initial_load_path"


@dataclass(frozen=True)
class ActivationCheckpointConfig(Options):
    mode: Literal["none", "selective", "full"] = key(
        "none", "recompute nothing, some, or all of a block in backward"
    )
    selective_ac_option: str = key(
        "op",
        "op keeps matrix products; a number N recomputes every Nth block",
        needs=Needs("mode", ("selective",)),
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        option = self.selective_ac_option
        if option != "op" and not (option.isdecimal() and int(option) > 0):
            yield (
                f"selective_ac_option is {option!r}; write op or a number N, to recompute every "
                "Nth block"
            )


@dataclass(frozen=True)
class CompileConfig(Options):
    enable: bool = key(False, "torch.compile each block")


@dataclass(frozen=True)
class CommConfig(Options):
    init_timeout_seconds: int = key(
        300, "time limit of a collective until the first step is done", low=1
    )
    train_timeout_seconds: int = key(100, "time limit of a collective afterwards", low=1)
    trace_buf_size: int = key(20000, "entries in NCCL's flight recorder; 0: off", low=0)


@dataclass(frozen=True)
class MetricsConfig(Options):
    log_freq: int = key(10, "steps between log lines", low=1)
    enable_tensorboard: bool = key(
        True, "write TensorBoard events; metrics.jsonl in job.dump_folder is always written"
    )
    save_tb_folder: str = key("tb", "folder inside job.dump_folder")
    peak_flops: float = key(
        0.0,
        "dense bfloat16 FLOP/s of one device, for MFU; 0: from a table of known devices",
        low=0,
    )


@dataclass(frozen=True)
class ProfilingConfig(Options):
    enable_profiling: bool = key(False, "write a trace every profile_freq steps")
    save_traces_folder: str = key("profile_traces", "folder inside job.dump_folder")
    profile_freq: int = key(10, "steps between traces; a trace takes four of them", low=4)
    enable_memory_snapshot: bool = key(False, "write CUDA memory snapshots")
    save_memory_snapshot_folder: str = key("memory_snapshot", "folder inside job.dump_folder")


@dataclass(frozen=True)
class ValidationConfig(Options):
    enable: bool = key(False, "measure the loss on held-out data")
    freq: int = key(100, "steps between validations", low=1)
    steps: int = key(10, "held-out global batches read each time; -1: all held-out data")
    local_batch_size: int | None = key(
        None, "sequences in one batch of one rank; none: as many as in training", low=1
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.steps != -1 and self.steps < 1:
            yield f"steps is {self.steps}; it must be at least 1, or -1 for all held-out data"


@dataclass(frozen=True)
class DebugConfig(Options):
    seed: int = key(
        0, "seed of the weights and, unless data.seed says otherwise, of the data's order"
    )
    deterministic: bool = key(False, "deterministic algorithms only (slower on GPUs)")
    traceback: bool = key(False, "show the traceback of a mistake, on every rank")


@dataclass(frozen=True)
class Config:
    job: JobConfig = field(default_factory=JobConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(
        default_factory=ActivationCheckpointConfig
    )
    compile: CompileConfig = field(default_factory=CompileConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
