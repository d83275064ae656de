"""Every key of a config: one frozen table of options per TOML section.

A key's type, default, meaning and range stand here alone. The keys of an optimizer's rule stand in
`matrixtitan/rules/`, and the types of data sources in `matrixtitan/data/sources.py`. Names follow
torchtitan's if torchtitan has the key. `problems` lists the wrong values and needs no torch. Code
that uses a section calls the section's `require`, and needs no checks of its own. Next: `load.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from matrixtitan.data.sources import SOURCE_TYPES, path_problems
from matrixtitan.extras import CheckoutNeeded
from matrixtitan.options import Needs, Options, key, not_one_of
from matrixtitan.plan.planner import egress_cap_problems
from matrixtitan.plan.transport_registry import TRANSPORTS
from matrixtitan.rules import RULES, MuonRule, Rule
from matrixtitan.rules.base import check_betas

try:
    from models import FAMILIES
except ImportError as error:
    if error.name != "models":
        raise
    raise CheckoutNeeded from error

Dtype = Literal["float32", "bfloat16"]

SEEDS = 2**63
"""A seed is a signed number of 64 bits: from -SEEDS to SEEDS - 1."""

OWNED = Needs("parallelism.strategy", ("matrix_fsdp",))
SHARDED = Needs("parallelism.strategy", ("matrix_fsdp", "fsdp2"))
RIVAL = Needs("parallelism.strategy", ("fsdp2",))


@dataclass(frozen=True)
class JobConfig(Options):
    dump_folder: str = key("./outputs", "folder of everything that the run writes; made if missing")
    description: str = key("", "free text, saved with the run's config")


@dataclass(frozen=True)
class ModelConfig(Options):
    name: str = key("llama3", f"model family: {', '.join(FAMILIES)}")
    flavor: str = key(
        "debug",
        "size of the model. llama3 has debug, 150M, 1B, 8B, 32B, 70B and 405B, and bench and "
        "netlab for measurements",
    )
    tokenizer_path: str = key(
        "",
        "a tiktoken rank file, or a folder that contains tokenizer.model; empty: the tokenizer "
        "that ships with matrixtitan",
    )
    tokenizer_pattern: Literal["", "llama3", "gpt2", "o200k", "qwen2"] = key(
        "",
        "how a rank file of no known family splits text into words. BOS and EOS then get the two "
        "ids after its last rank. Empty: the pattern of the file's family, or the one that "
        "tools/train_tokenizer.py wrote beside the file",
    )
    tie_embeddings: bool | None = key(
        None,
        "use one matrix for both the embedding and the output head; none: as the flavor defines it",
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.name not in FAMILIES:
            yield not_one_of("name", self.name, FAMILIES)


@dataclass(frozen=True)
class DataSource(Options):
    type: str = key(
        "python_stdlib",
        ", ".join(f"{name} ({source_type.doc})" for name, source_type in SOURCE_TYPES.items()),
    )
    path: tuple[str, ...] = key((), "files, folders or globs; python_stdlib takes no path")
    weight: float = key(
        1.0,
        "share of the training sequences, relative to the weights of the other sources; above 0",
    )
    field: str = key("text", "name of the field that holds the text, in a source of type jsonl")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.type not in SOURCE_TYPES:
            yield not_one_of("type", self.type, SOURCE_TYPES)
            return
        if not 0 < self.weight < float("inf"):
            yield (
                f"weight is {self.weight}; it must be positive and finite: to leave a source out, "
                "remove it"
            )
        yield from path_problems(self.type, self.path)
        if self.field != "text" and not SOURCE_TYPES[self.type].takes_field:
            yield f"field is set, but has no effect on a source of type {self.type}"


@dataclass(frozen=True)
class DataConfig(Options):
    sources: tuple[DataSource, ...] = key(
        (DataSource(),),
        "what is read: a list of tables, whose keys [[data.sources]] describes",
    )
    cache_dir: str = key(
        "~/.cache/matrixtitan", "folder that keeps tokenised text, for later runs too"
    )
    validation_fraction: float = key(
        0.02, "share of each source's documents that is held out for validation", low=0, high=1
    )
    on_bad_record: Literal["error", "skip"] = key(
        "error",
        "what to do with a malformed record: stop the run, or skip it and count it. Text files "
        "over 4 MB are split into pieces, and each piece counts as a record",
    )
    num_workers: int = key(
        1, "processes per rank that read batches ahead; 0 reads in the training process", low=0
    )
    seed: int | None = key(
        None, "seed of the order of the data; none: debug.seed", low=-SEEDS, high=SEEDS - 1
    )
    allow_data_change: bool = key(
        False, "resume even if the data or its order has changed since the checkpoint"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.sources:
            yield 'sources is empty; name at least one source, such as {type = "python_stdlib"}'
        for index, source in enumerate(self.sources):
            yield from (f"sources[{index}].{problem}" for problem in source.problems())


@dataclass(frozen=True)
class TrainingConfig(Options):
    global_batch_size: int = key(
        0,
        "sequences in a step, summed over all ranks and microbatches; required, at least 1",
    )
    steps: int = key(1000, "optimizer steps in the whole run", low=1)
    seq_len: int = key(2048, "tokens in a sequence", low=1)
    local_batch_size: int = key(
        1,
        "sequences in one forward pass of one rank. 0: chosen automatically, for any number of "
        "ranks, so that a pass has at most 8192 tokens, or one sequence",
        low=0,
    )
    max_norm: float = key(
        1.0,
        "upper limit on the gradient norm over all parameters, by clipping; 0 measures the norm "
        "and does not clip",
        low=0,
    )
    dtype: Dtype = key("float32", "dtype of the stored weights, gradients and optimizer states")
    mixed_precision_param: Dtype = key(
        "bfloat16", "dtype in which weights are gathered, and in which forward and backward compute"
    )
    mixed_precision_reduce: Dtype = key(
        "float32", "dtype in which gradients are summed over the ranks"
    )
    gc_freq: int = key(50, "steps between two Python garbage collections; 0: none", low=0)
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop",
        "what to do when the loss or the gradient norm is inf or nan, before the weights change: "
        "stop the run, or skip the step",
    )
    max_consecutive_skips: int = key(
        20,
        "number of steps skipped in a row after which the run stops",
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
    pattern: str = key("", "which parameters: full names, with the wildcards * and ?")
    lr: float | None = key(
        None, "peak learning rate of these parameters; none: lr or tail_lr of [optimizer]", low=0
    )
    weight_decay: float | None = key(
        None,
        "weight decay of these parameters; none: weight_decay or tail_weight_decay of [optimizer]",
        low=0,
    )

    def problems(self) -> Iterator[str]:
        if not self.pattern:
            yield "pattern is empty; write which parameters the group is for"
        yield from super().problems()


@dataclass(frozen=True)
class OptimizerConfig(Options):
    """`rule` is the table [optimizer.NAME]; a `name` alone stands for that rule's defaults."""

    name: str = key("muon", f"optimizer of the hidden matrices: {', '.join(RULES)}")
    lr: float = key(0.02, "peak learning rate of the hidden matrices", low=0)
    weight_decay: float = key(0.01, "decoupled weight decay of the hidden matrices", low=0)
    tail_lr: float = key(
        3e-3,
        "peak learning rate of the tail: all other parameters, which AdamW steps (embedding, "
        "output head, norms)",
        low=0,
    )
    tail_weight_decay: float = key(
        0.01, "decoupled weight decay of the tail; norms and biases have none", low=0
    )
    tail_betas: tuple[float, ...] = key(
        (0.9, 0.95), "the two betas of the tail's AdamW", low=0, below=1
    )
    tail_eps: float = key(1e-8, "epsilon of the tail's AdamW", low=0)
    tail_patterns: tuple[str, ...] = key(
        (),
        "further parameters that belong to the tail: full names, with the wildcards * and ?",
    )
    groups: tuple[OptimizerGroup, ...] = key(
        (),
        "parameters with rates of their own: a list of tables, whose keys [[optimizer.groups]] "
        "describes",
    )
    matrix_exchange: Literal["gather_each", "gather_once", "all_to_all"] = key(
        "all_to_all",
        "how ranks bring whole matrices together for the optimizer step: an all-gather for each "
        "matrix, one all-gather for all matrices, or an all-to-all that gives each rank some of "
        "them",
        needs=RIVAL,
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
        200,
        "steps in which the learning rate rises linearly; step warmup_steps runs at the peak rate",
        low=0,
    )
    total_steps: int | None = key(
        None,
        "step at which the schedule ends; none: training.steps. Later steps keep its last rate, "
        "which must not be 0",
        low=1,
    )
    decay_ratio: float | None = key(
        None,
        "share of all steps, at the end, in which the rate falls; between warm-up and decay the "
        "rate stays at the peak. none: the rate falls from the end of the warm-up on",
        low=0,
        high=1,
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = key("linear", "shape of the decay")
    min_lr_factor: float = key(
        0.0, "learning rate of the last step, as a multiple of the peak rate", low=0, high=1
    )

    def ends_at_zero(self, total_steps: int) -> bool:
        """Whether the rate is 0 at step `total_steps`, the schedule's last."""
        decay_steps = total_steps - max(self.warmup_steps, 1)
        if self.decay_ratio is not None:
            decay_steps = min(round(total_steps * self.decay_ratio), decay_steps)
        return decay_steps > 0 and self.min_lr_factor == 0

    def problems_in(self, steps: int) -> Iterator[str]:
        """What is wrong with this schedule in a run of `steps` steps, `problems` included."""
        yield from self.problems()
        total = steps if self.total_steps is None else self.total_steps
        if total < steps and self.ends_at_zero(total):
            yield (
                f"total_steps {total} ends before training.steps {steps}, and the rate of all "
                f"later steps would be 0: raise it to {steps}, or set min_lr_factor above 0"
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
        "matrix_fsdp",
        "how ranks share weights and work: matrix_fsdp shards whole matrices, fsdp2 shards rows "
        "(PyTorch's), zero1_owner shards the optimizer alone, ddp nothing",
    )
    data_parallel_replicate_degree: int = key(
        1,
        "number of copies of the weights (HSDP); each copy is sharded over the ranks of one group",
        low=1,
        needs=SHARDED,
    )
    data_parallel_shard_degree: int = key(
        -1,
        "ranks that share one copy of the weights; -1: all ranks, divided by the number of copies",
        needs=SHARDED,
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = key(
        "default",
        "which gathered weights are freed after forward: those of all units but the last "
        "(default), of all units (always), or of none (never). What is freed is gathered again in "
        "backward",
        needs=SHARDED,
    )
    transport: str = key(
        "auto",
        f"how weights travel from their owners and gradients back: {', '.join(TRANSPORTS)}. auto "
        "chooses by backend, ranks and machines, and logs its choice",
        needs=OWNED,
    )
    egress_cap: float = key(
        0.0,
        "upper limit on one rank's share of a unit, as a multiple of the average share; useful "
        "with transport = star across machines; 0 disables it",
        needs=OWNED,
    )
    prefetch: int = key(
        1,
        "number of units that are gathered ahead of the one that computes; each needs the memory "
        "of a gathered unit",
        low=0,
        needs=SHARDED,
    )
    reduce_each_microbatch: bool = key(
        True,
        "reduce gradients after each microbatch. false reduces once a step: less traffic, but each "
        "rank keeps the gradients of all parameters",
        needs=SHARDED,
    )
    fsdp2_transports: Literal["auto", "tuned", "stock"] = key(
        "auto",
        "collectives under fsdp2: PyTorch's own (stock), or the transports of matrix_fsdp (tuned). "
        "auto: tuned on gloo, stock on NCCL",
        needs=RIVAL,
    )
    dry_run_world_size: int = key(
        0,
        "number of ranks of a dry run: one process runs one of these ranks alone, without "
        "communication, to measure its memory. 0: no dry run",
        low=0,
    )
    dry_run_rank: int = key(0, "the rank that a dry run runs, from 0", low=0)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.transport not in ("auto", *TRANSPORTS):
            yield not_one_of("transport", self.transport, ("auto", *TRANSPORTS))
        yield from egress_cap_problems(self.egress_cap)
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
    enable: bool = key(
        False,
        "save checkpoints, and resume from the newest when started again. SIGTERM then saves "
        "before the run ends",
    )
    folder: str = key("checkpoint", "folder of the checkpoints, inside job.dump_folder")
    interval: int = key(500, "steps between two saves; the last step is always saved", low=1)
    keep_latest_k: int = key(
        10, "number of checkpoints that are kept, at least 2; 0 keeps all", low=0
    )
    load_step: int = key(
        -1, "step of the checkpoint to resume from; -1: the newest complete one", low=-1
    )
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = key(
        "disabled",
        "whether training goes on while a save is written, from copies in host memory (async); "
        "with pinned memory (CUDA only) the copying overlaps with training too",
    )
    initial_load_path: str = key(
        "",
        "checkpoint to begin from, if the run's own folder has none: a step-N folder, a folder of "
        "these, or what PyTorch's DCP saved",
    )
    initial_load_model_only: bool = key(
        True,
        "take the weights alone from initial_load_path. false takes optimizer state, step and "
        "place in the data too",
    )
    exclude_from_loading: tuple[str, ...] = key(
        (),
        "tensors that a load leaves as they are: a section (optimizer), a prefix up to a dot, or a "
        "name with the wildcards * and ?",
    )
    last_save_model_only: bool = key(
        False, "save the weights alone after the last step; a resume then needs an older checkpoint"
    )
    export_dtype: Dtype = key(
        "float32",
        "dtype of the weights in a last save of the weights alone",
        needs=Needs("last_save_model_only", (True,)),
    )
    on_error: Literal["stop", "continue"] = key(
        "stop",
        "what to do when a save fails: stop the run, or log the failure and train on. A failure of "
        "the last save always stops the run",
    )
    skip_corrupt: bool = key(False, "resume from an older checkpoint if the newest is damaged")

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
        "none",
        "what backward computes again instead of keeping it from forward: nothing, what "
        "selective_ac_option says, or everything in a block",
    )
    selective_ac_option: str = key(
        "op",
        "op: keep the results of attention and of every second matrix product, recompute the rest. "
        "A number N: recompute every Nth block",
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
    enable: bool = key(False, "compile each block with torch.compile")


@dataclass(frozen=True)
class CommConfig(Options):
    init_timeout_seconds: int = key(
        300, "time limit of a collective, in seconds, until the first step is done", low=1
    )
    train_timeout_seconds: int = key(
        100, "time limit of a collective, in seconds, after the first step", low=1
    )
    trace_buf_size: int = key(
        20000, "number of entries in NCCL's flight recorder; 0 turns it off", low=0
    )


@dataclass(frozen=True)
class MetricsConfig(Options):
    log_freq: int = key(10, "steps between two log lines", low=1)
    enable_tensorboard: bool = key(
        True,
        "write the curves for TensorBoard. metrics.jsonl in job.dump_folder is always written",
    )
    save_tb_folder: str = key("tb", "folder of TensorBoard's files, inside job.dump_folder")
    peak_flops: float = key(
        0.0,
        "peak speed of one device in dense bfloat16 FLOP/s, of which MFU is the share that is "
        "used; 0: from a table of known devices",
        low=0,
    )


@dataclass(frozen=True)
class ProfilingConfig(Options):
    enable_profiling: bool = key(
        False, "write a trace of one step, for each rank, every profile_freq steps"
    )
    save_traces_folder: str = key("profile_traces", "folder of the traces, inside job.dump_folder")
    profile_freq: int = key(
        10,
        "steps between two traces or two snapshots; a trace needs three steps of warm-up before it",
        low=4,
    )
    enable_memory_snapshot: bool = key(
        False,
        "write a snapshot of the CUDA allocator, for each rank, every profile_freq steps and when "
        "memory runs out",
    )
    save_memory_snapshot_folder: str = key(
        "memory_snapshot", "folder of the snapshots, inside job.dump_folder"
    )


@dataclass(frozen=True)
class ValidationConfig(Options):
    enable: bool = key(False, "measure the loss on held-out data")
    freq: int = key(
        100, "steps between two validations; the last step is always followed by one", low=1
    )
    steps: int = key(
        10,
        "size of a validation, in batches of training.global_batch_size sequences; -1: all "
        "held-out data",
    )
    local_batch_size: int | None = key(
        None, "sequences in one forward pass of one rank; none: as many as in training", low=1
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.steps != -1 and self.steps < 1:
            yield f"steps is {self.steps}; it must be at least 1, or -1 for all held-out data"


@dataclass(frozen=True)
class DebugConfig(Options):
    seed: int = key(
        0,
        "seed of the initial weights and, unless data.seed is set, of the order of the data",
        low=-SEEDS,
        high=SEEDS - 1,
    )
    deterministic: bool = key(False, "use deterministic algorithms alone, which are slower on GPUs")
    traceback: bool = key(
        False,
        "show the Python traceback of a mistake in the config, or of a rank that ends because it "
        "lost another rank, on every rank",
    )


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
